"""How fast can bytes move, and what does a launch take that moves none? What the casts are held against."""

import torch
import triton
import triton.language as tl


@triton.jit
def kvlab_copy_stream(source, target, n, GROWTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write each 8-byte word GROWTH times: 1 is a copy, 2 has the traffic of FP8 to BF16."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < n, eviction_policy="evict_first")
        if GROWTH == 1:
            tl.store(target + at, x, mask=at < n)
        else:
            tl.store(target + 2 * at[:, None] + tl.arange(0, 2)[None, :], x[:, None], mask=at[:, None] < n)


def stream(
    source: torch.Tensor, target: torch.Tensor, *, block: int = 2048, warps: int = 8, grid: int = 8
) -> None:
    """Copy `source`, or write it twice where `target` has twice its bytes. Contiguous, of 8-byte words.

    `grid` programs an SM share the blocks evenly; 0: a program a block, and the SMs take them as they come.
    """
    words = source.numel() * source.element_size() // 8
    growth = target.numel() * target.element_size() // (8 * words)
    sms = torch.cuda.get_device_properties(source.device).multi_processor_count
    kvlab_copy_stream[(grid * sms or triton.cdiv(words, block),)](
        source.view(-1).view(torch.int64),
        target.view(-1).view(torch.int64),
        words,
        GROWTH=growth,
        BLOCK=block,
        num_warps=warps,
    )


@triton.jit
def kvlab_copy_rows(source, target, indices, n, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Row `indices[i]` of WORDS 8-byte words, each written twice; nothing is counted or converted."""
    ROWS: tl.constexpr = LANES // WORDS
    lane = tl.arange(0, LANES)
    at = tl.program_id(0) * ROWS + lane // WORDS
    live = (lane < ROWS * WORDS) & (at < n)
    word = tl.load(indices + at, mask=live, other=0).to(tl.int64) * WORDS + lane % WORDS
    x = tl.load(source + word, mask=live)
    tl.store(target + 2 * word[:, None] + tl.arange(0, 2)[None, :], x[:, None], mask=live[:, None])


def scatter(
    source: torch.Tensor, target: torch.Tensor, indices: torch.Tensor, *, lanes: int = 512, warps: int = 8
) -> None:
    """The traffic of a cast in the order of `indices`: rows read, twice their bytes written. Contiguous."""
    words, n = source.shape[-1] // 8, indices.numel()
    kvlab_copy_rows[(triton.cdiv(n, lanes // words),)](
        source.view(-1).view(torch.int64),
        target.view(torch.uint8).view(-1).view(torch.int64),
        indices,
        n,
        WORDS=words,
        LANES=lanes,
        num_warps=warps,
    )


@triton.jit
def kvlab_floor(count, never, READS: tl.constexpr):
    """End at once, or READS: when `count` is here, which is not negative; else `never` were written."""
    if READS:
        found = tl.load(count)
        if found < 0:
            tl.store(never, found)


def floor(count: torch.Tensor, never: torch.Tensor, *, programs: int, warps: int, reads: bool) -> None:
    """Launch `programs` that do nothing, or only read `count`, int32 and not negative."""
    kvlab_floor[(programs,)](count, never, READS=reads, num_warps=warps)
