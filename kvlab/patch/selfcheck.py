"""Does this strategy do on this host what it promises? Asked once, on a few rows, before it is trusted.

Runs before capture, compiles the kernels that serving will use, and costs milliseconds once compiled. The
exact strategies must give stock's own bits for every FP8 code; `fused` must be as near to float32 as
attention on stock's wide rows is, and give the same bits twice.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.patch import casts, write
from kvlab.patch.policy import Facts

_SLOTS = 256
_TOKENS = 48
# Another batch, or a longer table, may be another kernel's (kvlab.kernels.choice).
_BATCHES = (2, 16, 64)
_CONTEXT = 4096
# Above what the CUDA decode does without a schedule (128 tokens for each of its CTAs): the schedule's turn.
_LONG = 20_000
# Attention in the wide dtype rounds probabilities and outputs: measured 0.2 % for flashinfer's BF16 kernel
# (data/recorded/h200-stock). A wrong row or code is off by far more than three times that.
FUSED_TOLERANCE = 0.006


def check(strategy: str, facts: Facts) -> str | None:
    """None, or what went wrong in a few words. Raises what the kernel raises."""
    return _CHECKS[strategy](facts)


def _codes(facts: Facts) -> torch.Tensor:
    """[256, 1, width] FP8: every code near every column, with gaps between slots."""
    codes = torch.arange(_SLOTS * facts.width, device=facts.device, dtype=torch.int64)
    codes = (codes + torch.div(codes, facts.width, rounding_mode="floor")) % 256
    backing = torch.zeros((_SLOTS, facts.width + 16), dtype=torch.uint8, device=facts.device)
    backing[:, : facts.width] = codes.view(_SLOTS, facts.width).to(torch.uint8)
    return backing[:, : facts.width].unsqueeze(1).view(facts.fp8)


def _active(facts: Facts) -> ActiveSlots:
    """Every other slot, some twice, in two requests, before a stale tail."""
    slots = torch.arange(0, _SLOTS, 2, dtype=torch.int32, device=facts.device)
    slots = torch.cat([slots, slots[:16], torch.full((32,), 1, dtype=torch.int32, device=facts.device)])
    bounds = torch.tensor([0, 40, _SLOTS // 2 + 16], dtype=torch.int32, device=facts.device)
    if facts.page_size == 1 or _SLOTS % facts.page_size:
        return ActiveSlots.ragged(slots, bounds)
    pages = _SLOTS // facts.page_size
    table = torch.arange(pages, dtype=torch.int32, device=facts.device).flip(0).repeat(2, 1)
    lengths = [max(pages // 2 * facts.page_size - 1, 1), 1]
    return ActiveSlots.paged(
        table, torch.tensor(lengths, dtype=torch.int32, device=facts.device), facts.page_size
    )


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Bits as integers. A CPU's cast writes its own NaN: there all NaN count as one."""
    bits = t.contiguous().view(torch.int16)
    return torch.where(t.isnan(), -1, bits) if t.device.type == "cpu" else bits


def _differs(got: torch.Tensor, want: torch.Tensor) -> str | None:
    wrong = (_bits(got) != _bits(want)).sum().item()
    return f"{wrong} of {want.numel()} values differ from the stock cast" if wrong else None


def _shadow(facts: Facts) -> str | None:
    rows, active = _codes(facts), _active(facts)
    want = torch.zeros(rows.shape, dtype=facts.q_dtype, device=facts.device)
    slots = active.distinct(_SLOTS)
    want[slots] = rows.to(facts.q_dtype)[slots]
    for _ in range(_launches(facts.device)):
        out = torch.zeros_like(want)
        casts.shadow(rows, out, active)
        if (why := _differs(out, want)) is not None:
            return why
    return _layers(facts) if casts.on_device(facts.device) else None


def _layers(facts: Facts) -> str | None:
    """New rows written and active ones cast as the layers of an eager step are: the later ones from launches
    that the first one's were kept for.
    """
    rank = facts.rank or facts.width - 64
    pool, active = _codes(facts).view(torch.uint8).contiguous(), _active(facts)
    slots = active.distinct(_SLOTS)
    generator = torch.Generator().manual_seed(0)
    new = torch.randn((7, facts.width), generator=generator).to(facts.device, facts.q_dtype)
    loc = torch.tensor([2, 80, 3, 254, 1, 40, 5], device=facts.device)
    layers = casts.kernels("layers").WriteAndCast()
    for _ in range(3):
        new, pool = -new, pool.flip(0)
        buffer, want_buffer = pool.clone(), pool.clone()
        nope, rope = new[:, :rank], new[:, rank:]
        layout = write.laid_out(buffer, loc, nope, rope)
        given = write.NewRows(buffer, loc, nope, rope, facts.fp8, layout)
        rows, out = buffer.view(facts.fp8), torch.ones(pool.shape, dtype=facts.q_dtype, device=facts.device)
        if not layers.again(given, rows, out, active):
            given.write(out)
            casts.shadow(rows, out, active)
            layers.note(given, rows, out, active)
        want_buffer[loc] = new.to(facts.fp8).view(torch.uint8).unsqueeze(1)
        want = torch.ones_like(out)
        want[0] = 0
        want[slots] = want_buffer.view(facts.fp8).to(facts.q_dtype)[slots]
        wrong = (buffer != want_buffer).sum().item()
        if wrong:
            return f"{wrong} of {pool.numel()} bytes differ from the stock write"
        if (why := _differs(out, want)) is not None:
            return why
    return None


def _launches(device: torch.device) -> int:
    """Of each kind of launch: on a GPU the first is Triton's own, later ones are direct (kernels.direct)."""
    return 2 if device.type == "cuda" else 1


def _gather(facts: Facts) -> str | None:
    rows, active = _codes(facts), _active(facts)
    found = casts.slot_map(active, _SLOTS)
    compact = torch.zeros((found.rows, 1, facts.width), dtype=facts.q_dtype, device=facts.device)
    casts.gather(rows, compact, found)
    renamed = ActiveSlots(found.new_indices, active.bounds, active.page_size, active.is_paged)
    wide = rows.to(facts.q_dtype)
    for old, new in zip(active.slots(), renamed.slots(), strict=True):
        wrong = _differs(compact[new], wide[old])
        if wrong:
            return wrong
    return None


def _fused(facts: Facts) -> str | None:
    if facts.heads is None or facts.rank is None:
        return "heads not known"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((_SLOTS, 1, facts.width), generator=generator).to(facts.fp8).to(facts.device)
    for batch in _BATCHES:
        for longest in _longest(facts.device):
            wrong = _fused_batch(facts, rows, batch, longest, generator)
            if wrong is not None:
                return f"batch {batch}, up to {longest:,} tokens: {wrong}"
    return None


def _longest(device: torch.device) -> tuple[int, ...]:
    """Tokens of a batch's last request, a round each. A CPU decodes in one way, whatever the lengths."""
    return (_TOKENS, _LONG) if device.type == "cuda" else (_TOKENS,)


def _fused_batch(
    facts: Facts, rows: torch.Tensor, batch: int, longest: int, generator: torch.Generator
) -> str | None:
    """Requests of 1 to 48 tokens and a last one of `longest`, some of the same slots, before a stale tail as
    long as a server's table.
    """
    from kvlab.kernels import reference
    from kvlab.patch.strategies.fused import attend

    device = facts.device
    lengths = torch.arange(batch) * 5 % _TOKENS + 1
    lengths[-1] = longest
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    slots = torch.zeros(batch * _CONTEXT + longest, dtype=torch.int32)
    slots[: bounds[-1]] = torch.randint(_SLOTS, (int(bounds[-1]),), generator=generator, dtype=torch.int32)
    active = ActiveSlots.ragged(slots.to(device), bounds.to(device, torch.int32))
    q = torch.randn((batch, facts.heads, facts.width), generator=generator).to(device, facts.q_dtype)
    q_nope, q_pe = q[..., : facts.rank], q[..., facts.rank :]
    scale = facts.width**-0.5
    workspace = None
    if device.type == "cuda":
        from kvlab.kernels import decode

        # Not the kernel's own, which would stay.
        workspace = decode.workspace_for(batch, facts.heads, device, kv_lora_rank=facts.rank)
    got, again = (
        attend(q_nope, q_pe, rows, active, sm_scale=scale, logit_cap=0.0, workspace=workspace)
        for _ in range(2)
    )
    want, _ = reference.mla_attention(q_nope, q_pe, rows, active, sm_scale=scale)
    error = ((got.float() - want).norm() / want.norm()).item()
    # A NaN compares as neither, and must not pass.
    if not error <= FUSED_TOLERANCE:
        return f"relative error {error:.2g} against float32"
    return None if torch.equal(_bits(got), _bits(again)) else "two calls gave two answers"


def check_write(facts: Facts) -> str | None:
    """The one-launch KV write: the bytes of stock's cast for every value of the query dtype."""
    values = torch.arange(2**16, dtype=torch.int32, device=facts.device).to(torch.int16).view(facts.q_dtype)
    rank = facts.rank or facts.width - 64
    tokens = values.numel() // rank + 1
    padded = torch.cat([values, values[: tokens * rank - values.numel()]]).view(tokens, rank)
    rope = padded[:, : facts.width - rank]
    want = torch.cat([padded, rope], dim=1).to(facts.fp8).view(torch.uint8).unsqueeze(1)
    loc = torch.arange(tokens, device=facts.device)
    wide = torch.ones((1, 1, facts.width), dtype=facts.q_dtype, device=facts.device)
    for clear in [None, wide] * _launches(facts.device):
        buffer = torch.zeros_like(want)
        write.quantise(buffer, loc, padded, rope, facts.fp8, clear)
        wrong = (buffer != want).sum().item()
        if wrong:
            return f"{wrong} of {want.numel()} bytes differ from the stock write"
        if clear is not None and clear.any():
            return "slot 0 was not zeroed along"
        wide.fill_(1)
    return None


def check_joint(facts: Facts) -> str | None:
    """KV write and cast in one launch: the bytes and bits of the two, one after the other.

    Launched after the kernel before it as a pass's first layer is, and early as the others are: two kernels.
    """
    rank = facts.rank or facts.width - 64
    rows, active = _codes(facts), _active(replace(facts, page_size=1))
    pool = rows.view(torch.uint8).clone()
    generator = torch.Generator().manual_seed(0)
    new = torch.randn((7, facts.width), generator=generator).to(facts.device, facts.q_dtype) * 300
    # Two that nobody reads, the others from among those that are read.
    loc = torch.tensor([2, 80, 3, 254, 0, 40, 5], device=facts.device)
    found = casts.slot_list([active], _SLOTS)
    casts.without(found, loc)
    for early in [False, True] * _launches(facts.device):
        new = -new
        given = write.NewRows(pool, loc, new[:, :rank], new[:, rank:], facts.fp8)
        apart = replace(given, buffer=pool.clone())
        got = torch.zeros(rows.shape, dtype=facts.q_dtype, device=facts.device)
        casts.write_shadow(found, got, given, early=early)
        apart.write()
        want = torch.zeros_like(got)
        casts.shadow(apart.buffer.view(facts.fp8), want, active)
        wrong = (given.buffer != apart.buffer).sum().item()
        if wrong:
            return f"{wrong} of {pool.numel()} bytes differ from the two launches"
        # Slot 0 is read and written at once; what nobody reads is written too.
        others = [s for s in range(1, _SLOTS) if s not in (3, 5)]
        if (why := _differs(got[others], want[others])) is not None:
            return why
    return None


_CHECKS: dict[str, Callable[[Facts], str | None]] = {
    "shadow": _shadow,
    "gather": _gather,
    "replan": lambda facts: None,
    "fused": _fused,
    # flashinfer's own kernel: its plan refuses what it cannot do.
    "native": lambda facts: None,
}
