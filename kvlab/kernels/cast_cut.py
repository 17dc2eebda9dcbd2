"""How is a cast cut for a chip? Lanes, bytes a lane, warps and programs: host arithmetic, no launch."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from kvlab.kernels.chip import chip

# 32-bit registers of an SM, of every chip since SM80.
_REGISTERS = 65536
# From so many tiles a program on they are drawn; an atomic each is dear before that.
DRAWN = 4


@dataclass(frozen=True)
class Tuning:
    """How the cast is cut: `lanes` x `unit` bytes are read at once by a program of `warps`.

    `grid` programs an SM walk over the work; `native` uses the chip's FP8 conversions rather than integers.
    Few rows are read by `few` lanes of twice `least` bytes, even fewer by `least`.
    """

    lanes: int
    unit: int
    warps: int
    grid: int
    native: bool
    least: int = 4
    few: int = 128


@lru_cache
def tuning(device: torch.device) -> Tuning:
    """The cut for a device's chip."""
    return tuning_for(chip(device)[0])


def tuning_for(capability: int) -> Tuning:
    """The cut that sweeps on an H200 found best (data/recorded/h200-cast-notes-3); small in the interpreter,
    capability 0.

    The grid is at most what fits an SM at once. More programs slow small steps, which wait for all to start.
    """
    if not capability:
        return Tuning(lanes=128, unit=16, warps=4, grid=1, native=False)
    if capability < 89:
        return Tuning(lanes=512, unit=8, warps=8, grid=4, native=False, few=256)
    return Tuning(lanes=1024, unit=8, warps=8, grid=3, native=True, few=256)


def constants(cut: Tuning, width: int, is_aligned: bool) -> dict[str, int | bool]:
    """What `kvlab_cast` is compiled with for rows of `width` bytes: units, lanes, words, warps, registers.

    `is_aligned`: the rows read and those written each start at a multiple of 16 bytes.
    """
    unit = widest_unit(width, cut.unit)
    least = min(unit, cut.least)
    held = triton.next_power_of_2(width // least)
    in_words = cut.native and unit % 4 == 0 and is_aligned
    registers = _REGISTERS // (32 * cut.warps * cut.grid)
    return {
        "WIDTH": width,
        "UNIT": unit,
        "FEW_UNIT": min(unit, 2 * least),
        "LEAST_UNIT": least,
        "LANES": max(cut.lanes, held),
        "FEW_LANES": max(cut.few, held),
        "NATIVE": cut.native,
        "WORDS": in_words,
        "num_warps": cut.warps,
        # What lets so many programs stay on an SM; the compiler may spill below it, or pass it by one.
        **({"maxnreg": registers} if in_words and registers < 255 else {}),
    }


@lru_cache
def programs(cut: Tuning, width: int, most: int, batch: int, rows: int) -> int:
    """How many are launched, `most` on a chip: fewer where the tables can hold no more than those have to do.

    `batch` requests of at most `rows` rows of `width` bytes, or with 0 a list of so many rows.
    """
    its = constants(cut, width, False)
    units = (its["FEW_UNIT"],) if batch else (its["LEAST_UNIT"], its["FEW_UNIT"])
    tiles = (max(batch, 1) * -(-rows // (int(its["FEW_LANES"]) // (width // int(u)))) for u in units)
    return max(1, next((n for n in tiles if n <= most), most))


@lru_cache
def may_draw(cut: Tuning, width: int, programs: int, requests: int, rows: int) -> bool:
    """Can tiles be drawn where each of `requests` has at most `rows` rows of `width` bytes?"""
    its = constants(cut, width, False)
    rows_a_tile = int(its["LANES"]) // (width // int(its["UNIT"]))
    return requests * -(-rows // rows_a_tile) > DRAWN * programs


def widest_unit(width: int, most: int) -> int:
    """Bytes that a lane reads at once: the largest power of two up to 16 and `most` that divides `width`."""
    return next(u for u in (16, 8, 4, 2, 1) if u <= most and width % u == 0)


def requests_held(batch: int) -> int:
    """A power of two that holds `batch`. Between one and 64 the compiler takes a third more registers."""
    return 1 if batch == 1 else max(64, triton.next_power_of_2(batch))
