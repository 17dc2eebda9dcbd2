"""Pools, tables and expectations that the kernel tests share."""

from dataclasses import dataclass

import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.cast_cut import DRAWN, constants, tuning
from kvlab.kernels.chip import chip
from kvlab.kernels.widen import NAN_BITS

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.bfloat16, torch.float16)
NAN_BYTES = (0x7F, 0xFF)
# A pattern that no FP8 code widens to: found again, nothing wrote there.
UNTOUCHED = 0x5A5B


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def stock_bits(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of `rows.to(dtype)` on a CUDA device; CPU torch writes other NaN bits."""
    wide = rows.to(dtype)
    return bits(wide) if rows.is_cuda else torch.where(wide.isnan(), NAN_BITS, bits(wide))


def untouched(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=torch.int16, device=device).view(dtype)


def random_pool(
    slots: int,
    width: int,
    fmt: torch.dtype,
    *,
    seed: int,
    device: str = "cpu",
    padding: int = 0,
    latent_head: bool = True,
) -> torch.Tensor:
    """Every byte drawn, so every code occurs; `padding` bytes between rows, as in a strided pool."""
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (slots, width + padding), dtype=torch.uint8, generator=g)
    pool = drawn.to(device)[:, :width].view(fmt)
    return pool[:, None] if latent_head else pool


def most_undrawn(width: int, device: str) -> int:
    """Rows of `width` bytes that a cast there shares out evenly: of more, its programs draw tiles."""
    where = torch.device(device)
    cut = tuning(where)
    its = constants(cut, width, False)
    rows_a_tile = its["LANES"] // (width // its["UNIT"])
    return rows_a_tile * DRAWN * cut.grid * chip(where)[1]


def poison(rows: torch.Tensor, active: ActiveSlots) -> torch.Tensor:
    """Finite codes in the active slots, NaN codes in all others: slot 0, page tails, what nobody reads."""
    raw = rows.view(torch.uint8)
    flat = raw[:, 0] if raw.dim() == 3 else raw
    used = active.distinct(flat.shape[0])
    kept = torch.where((flat[used] & 0x7F) >= 0x78, 0x38, flat[used])
    flat[::2], flat[1::2] = NAN_BYTES[0], NAN_BYTES[1]
    flat[used] = kept
    return rows


@dataclass(frozen=True)
class Case:
    """A drawn table: what it says is known to the test, what lies behind its valid part is rubbish."""

    active: ActiveSlots
    num_slots: int


def ragged_case(
    lengths: list[int],
    *,
    num_slots: int,
    seed: int,
    index_dtype: torch.dtype = torch.int32,
    tail: int = 5,
    holes: bool = False,
    device: str = "cpu",
) -> Case:
    """Slots drawn with repeats; `holes` puts -1 and slots past the pool among them; a stale tail behind."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    low, high = (-2, num_slots + 3) if holes else (0, num_slots)
    indices = torch.randint(low, high, (total + tail,), generator=g, dtype=torch.int64).clamp(min=-1)
    if tail:
        stale = torch.tensor([-1, 0, num_slots - 1, num_slots, 2**31 - 1])
        indices[total:] = stale[torch.randint(0, 5, (tail,), generator=g)]
    indptr = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Case(ActiveSlots.ragged(indices.to(device, index_dtype), indptr.to(device)), num_slots)


def paged_case(
    lengths: list[int],
    page_size: int,
    *,
    num_slots: int,
    seed: int,
    spare: int = 2,
    holes: bool = False,
    device: str = "cpu",
) -> Case:
    """Pages drawn with repeats; unused entries are -1 or rubbish; the table is a slice of a wider one."""
    g = torch.Generator().manual_seed(seed)
    pages = num_slots // page_size
    wide = max((-(-n // page_size) for n in lengths), default=0) + spare
    table = torch.randint(-1 if holes else 0, pages, (len(lengths), wide + 3), generator=g, dtype=torch.int32)
    for row, n in zip(table, lengths, strict=True):
        stale = torch.tensor([-1, -7, pages, 2**31 - 1], dtype=torch.int32)
        unused = row[-(-n // page_size) :]
        unused[:] = stale[torch.randint(0, 4, (unused.numel(),), generator=g)]
    table = table.to(device)[:, :wide]
    return Case(
        ActiveSlots.paged(table, torch.tensor(lengths, dtype=torch.int32, device=device), page_size),
        num_slots,
    )
