"""Which recorded run is the newest, and which part of it was asked for?"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvlab import data
from kvlab.errors import BadInput

T = TypeVar("T")
V = TypeVar("V", int, str)


def newest(file: str, kind: type[T]) -> tuple[Path, T]:
    """The newest `data/recorded/*/<file>` by its provenance's date, decoded as `kind`."""
    return by_date(file, kind)[0]


def by_date(file: str, kind: type[T]) -> list[tuple[Path, T]]:
    """All `data/recorded/*/<file>`, at least one, the newest first by their provenance's dates."""
    found = []
    for path in sorted(data.recorded().glob(f"*/{file}")):
        try:
            found.append((path, msgspec.json.decode(path.read_bytes(), type=kind)))
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise BadInput(f"{path.name}: not a recorded run ({e}); restore data/recorded") from None
        except OSError as e:
            raise BadInput(f"{path}: cannot be read ({e.strerror}); restore data/recorded") from None
    if not found:
        raise BadInput(f"--recorded: no {file} under data/recorded; measure on a GPU instead")
    return sorted(found, key=lambda f: f[1].provenance.date, reverse=True)


def given(context: Any) -> set[str]:
    """The options of a command, by their names, that were given on its command line."""
    return {n for n in context.params if (s := context.get_parameter_source(n)) and s.name == "COMMANDLINE"}


def spelt(name: str) -> str:
    """How a command's parameter is spelt on its command line."""
    return f"--{name.replace('_', '-')}"


def refuse_others(context: Any, *narrows: str) -> None:
    """BadInput for an option beside --recorded that neither narrows what is shown nor says how it is."""
    for name in sorted(given(context) - {*narrows, "recorded", "json", "html", "out"}):
        raise BadInput(
            f"{spelt(name)}: is for measuring, and --recorded shows a run that was made; leave one out"
        )


def there(option: str, wanted: Iterable[V], found: Iterable[V]) -> set[V]:
    """`wanted`, if all of it is among what the recorded run has of it. Raises BadInput."""
    wanted, found = set(wanted), set(found)
    for one in sorted(wanted - found, key=str):
        has = ", ".join(map(str, sorted(found))) or "none"
        raise BadInput(f"{option}: {one} is not in the recorded run, which has {has}")
    return wanted
