"""How do the Triton decode kernels cut the work, on which chip? Host arithmetic, no launch."""

from dataclasses import dataclass

import triton

# Few registers matter more to the merge than the speed of the float32 columns that it hardly ever computes.
MERGE_WARPS, MERGE_STAGES, WIDE_TILE = 2, 2, 2
_SMALL_SHARED = (86, 89, 120, 121)


@dataclass(frozen=True)
class Tuning:
    """How the Triton kernels cut the work.

    `block_h` query columns (heads x query tokens) and `tile` tokens at a time by `warps`, loads `stages`
    deep; `shares` programs an SM, each with at least `min_tiles` tiles. `method` opens FP8 codes
    (mla_pairs.open_pairs). `pdl`: programmatic dependent launch (SM90 on). A share of at most `shallow`
    tiles is loaded two deep: a deeper pipeline would only delay it.
    """

    block_h: int
    tile: int
    warps: int
    stages: int
    shares: int
    min_tiles: int
    method: str
    pdl: bool = False
    shallow: int = 0


def tuning(capability: int, columns: int, batch: int) -> Tuning:
    """The cut for a compute capability (0: the interpreter), query columns a request and requests.

    SM90's was swept on an H200. Few requests are split widest: eight warps on a tile shorten each share;
    many keep two programs an SM busy, whose waits overlap. SM89 and SM120 have 99 KiB a block and an SM.
    """
    if capability == 0:
        return Tuning(16, 16, 4, 1, 2, 1, "plain", shallow=2)
    method, pdl = "cvt" if capability >= 89 else "bits", capability >= 90
    is_small = capability in _SMALL_SHARED
    if columns > 16:
        return Tuning(32, 32 if is_small else 64, 8, 5, 1, 1, method, pdl)
    if batch < 16 or is_small or capability < 90:
        return Tuning(16, 64, 8, 5, 1, 1, method, pdl, shallow=2)
    return Tuning(16, 64, 4, 5, 2, 1, method, pdl)


def columns_of(tokens: int, heads: int, batch: int) -> int:
    """Query columns a request: its heads times its query tokens, rounded up."""
    return heads * max(1, -(-tokens // max(batch, 1)))


def pairs_held(width: int) -> int:
    """Pairs of columns as the power of two that a Triton block needs, and a dot at least 16."""
    return max(16, triton.next_power_of_2(width // 2))


def merge_cut(columns: int, pairs: int) -> tuple[int, int]:
    """Pairs of a column that a program of the merge takes, and pieces it reads at once.

    Few columns may each have hundreds of pieces, so they are cut fine; many columns have few.
    """
    chunk = 16
    while chunk < pairs and columns * (pairs // chunk) > 2048:
        chunk *= 2
    return chunk, max(4, 1024 // chunk)
