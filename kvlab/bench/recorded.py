"""Which recorded run is the newest?"""

from pathlib import Path
from typing import TypeVar

import msgspec

from kvlab import data
from kvlab.errors import BadInput

T = TypeVar("T")


def newest(file: str, kind: type[T]) -> tuple[Path, T]:
    """The newest `data/recorded/*/<file>` by its provenance's date, decoded as `kind`."""
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
    return max(found, key=lambda f: f[1].provenance.date)
