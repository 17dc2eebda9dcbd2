"""What can this card do? A sheet of cards with sources, and the live card where there is one."""

import difflib
import subprocess
import sys
import tomllib
from functools import cache
from importlib import resources

import msgspec

from kvlab.errors import BadInput
from kvlab.units import GB, KIB, MIB


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One card. `memory` is the driver's total in bytes (nvidia-smi), not the round number on the box.

    What a process can use is less still: the CUDA context, and what other processes hold. `bandwidth` is the
    datasheet's, bytes a second. `shared_memory_per_block` is the opt-in maximum, bytes.
    `tensor` has dense tensor-core peaks, flop/s by format; `link` says how cards of a host are connected and
    `link_bandwidth` what one card sends at most, bytes a second in one direction. None: not known.
    """

    key: str
    name: str
    memory: int
    source: str
    advertised: str | None = None
    bandwidth: int | None = None
    compute_capability: tuple[int, int] | None = None
    sm_count: int | None = None
    shared_memory_per_block: int | None = None
    l2: int | None = None
    tensor: dict[str, int] = {}
    link: str | None = None
    link_bandwidth: int | None = None
    aliases: tuple[str, ...] = ()

    @property
    def sm(self) -> str | None:
        """`SM120` for compute capability 12.0."""
        return None if self.compute_capability is None else "SM{}{}".format(*self.compute_capability)


def names() -> list[str]:
    """Keys of the sheet."""
    return list(_sheet())


def lookup(name: str) -> Gpu:
    """A card by key, alias or the driver's product name, or this machine's (`live`). Raises BadInput."""
    wanted = _plain(name)
    if wanted in ("live", "auto"):
        card = live()
        if card is None:
            raise BadInput(f"--gpu {name}: no NVIDIA card answers here; name one: {', '.join(names())}")
        return card
    found = _find(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, names(), n=3, cutoff=0.5)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise BadInput(
            f"--gpu: no card is called {name!r}{hint}; the sheet has {', '.join(names())}, or say live"
        )
    return found


def live(index: int = 0) -> Gpu | None:
    """The card in this machine, or None. nvidia-smi says name and memory, the sheet adds the rest.

    torch is asked only where nvidia-smi does not answer and torch is already imported: asking it starts a
    CUDA context.
    """
    row = _nvidia_smi(index) or _torch(index)
    if row is None:
        return None
    name, memory, capability = row
    known = _find(_plain(name))
    if known is None:
        return Gpu(
            key="live",
            name=name,
            memory=memory,
            source="this machine's driver",
            compute_capability=capability,
        )
    return msgspec.structs.replace(
        known, name=name, memory=memory, source=f"this machine's driver; bandwidth and limits: {known.source}"
    )


@cache
def _sheet() -> dict[str, Gpu]:
    text = resources.files("kvlab").joinpath("presets/gpus.toml").read_text(encoding="utf-8")
    return {key: _card(key, row) for key, row in tomllib.loads(text).items()}


def _card(key: str, row: dict) -> Gpu:
    major, minor = row["compute_capability"].split(".")
    return Gpu(
        key=key,
        name=row["name"],
        memory=row["memory_mib"] * MIB,
        source=row["source"],
        advertised=row["advertised"],
        bandwidth=row["bandwidth_gb_s"] * GB,
        compute_capability=(int(major), int(minor)),
        sm_count=row["sm_count"],
        shared_memory_per_block=row["shared_memory_per_block_kib"] * KIB,
        l2=row["l2_mib"] * MIB,
        tensor={name: tera * 10**12 for name, tera in row.get("tensor_tflops", {}).items()},
        link=row.get("link"),
        link_bandwidth=int(row["link_gb_s"] * GB) if "link_gb_s" in row else None,
        aliases=tuple(row.get("aliases", ())),
    )


def _plain(name: str) -> str:
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


def _find(wanted: str) -> Gpu | None:
    for card in _sheet().values():
        if wanted in (card.key, *(_plain(n) for n in (card.name, *card.aliases))):
            return card
        if wanted == _plain(card.name).removeprefix("nvidia-"):
            return card
    return None


def _nvidia_smi(index: int) -> tuple[str, int, tuple[int, int]] | None:
    query = [
        "nvidia-smi",
        f"--id={index}",
        "--query-gpu=name,memory.total,compute_cap",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    try:
        name, mib, capability = done.stdout.strip().splitlines()[0].rsplit(", ", 2)
        major, minor = capability.split(".")
        return name, int(mib) * MIB, (int(major), int(minor))
    except (IndexError, ValueError):
        return None


def _torch(index: int) -> tuple[str, int, tuple[int, int]] | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    card = torch.cuda.get_device_properties(index)
    return card.name, card.total_memory, (card.major, card.minor)
