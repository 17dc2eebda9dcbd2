"""What must every kernel equal? Plain torch on raw FP8 rows; clear rather than fast, on any device.

Rows are what SGLang's MLA pool holds, written by `.to(fp8)` and unscaled: [slots, kv_lora_rank +
qk_rope_head_dim], latent first, rope behind. How stock treats `k_scale` (read in SGLang 0.5.8 to 0.5.23): the
MLA pool's write and flashinfer_mla never read it, and fa3 takes it for head dims up to 256 only, which the
absorbed 576 is not. So 1.0 is stock. Another value scales K and V both, as rows that were divided by it when
written would need.
"""

import math

import torch

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots, expect_active
from kvlab.kernels.checks import FP8_DTYPES, WIDE_DTYPES, described, expect, number, one_of, rows_2d

_ROWS = (*FP8_DTYPES, *WIDE_DTYPES)
_COMPUTED_IN = (torch.float32, torch.float64)
_CAST_TO = (*WIDE_DTYPES, *_COMPUTED_IN)


def full_cast(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stock's cast: every slot of the pool, used or not. [slots, …] FP8 -> [slots, …] `dtype`."""
    rows_2d("rows", rows, _ROWS)
    one_of("dtype", dtype, _CAST_TO)
    return rows.to(dtype)


def shadow_cast(rows: torch.Tensor, shadow: torch.Tensor, active: ActiveSlots) -> torch.Tensor:
    """Cast the active slots into their own places in `shadow`, shaped as `rows`; nothing else is written.

    Returns `shadow`. Raises BadInput where shapes or dtypes do not match.
    """
    source = rows_2d("rows", rows)
    target = rows_2d("shadow", shadow, WIDE_DTYPES)
    expect("shadow", target, f"{list(source.shape)} as rows", sizes=tuple(source.shape), device=source.device)
    expect_active(active, source.device)
    slots = active.distinct(source.shape[0])
    target[slots] = _take(source, slots).to(target.dtype)
    return shadow


def gather_cast(
    rows: torch.Tensor, active: ActiveSlots, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast each distinct active slot once, in order of first use, into compact rows.

    Returns `compact` [n, row] (or [n, 1, row]) of `dtype` and `new_indices`, shaped and typed as the table:
    valid entries point into `compact`, all others keep what the table holds. Paged: whole pages, n a multiple
    of page_size, and positions that no request reads are zero.
    """
    source = rows_2d("rows", rows)
    expect_active(active, source.device)
    one_of("dtype", dtype, _CAST_TO)
    size = active.page_size
    per_request = active.entries()
    entries = torch.cat([*per_request, active.table.new_empty(0, dtype=torch.long)])
    used = torch.cat([*_tokens_used(active, per_request), torch.empty_like(entries[:0])])
    is_entry = (entries >= 0) & (entries < source.shape[0] // size)

    distinct, inverse = torch.unique(entries[is_entry], return_inverse=True)
    position = torch.arange(inverse.numel(), device=source.device)
    first = torch.full_like(distinct, inverse.numel()).scatter_reduce(0, inverse, position, "amin")
    order = torch.argsort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=source.device)
    filled = torch.zeros_like(distinct).scatter_reduce(0, inverse, used[is_entry], "amax")[order]

    offset = torch.arange(size, device=source.device)
    keep = (offset < filled[:, None]).flatten()
    slots = (distinct[order][:, None] * size + offset).flatten()
    compact = torch.zeros(slots.numel(), source.shape[1], dtype=dtype, device=source.device)
    compact[keep] = _take(source, slots[keep]).to(dtype)

    new = active.table.clone()
    in_table = torch.zeros_like(new, dtype=torch.bool)
    if active.is_paged:
        for row, e in zip(in_table, per_request, strict=True):
            row[: e.numel()] = True
    else:
        in_table[: entries.numel()] = True
    where = torch.zeros_like(entries)
    where[is_entry] = rank[inverse]
    new[in_table] = torch.where(is_entry, where, entries).to(new.dtype)
    return compact.view(-1, *rows.shape[1:]), new


def mla_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    rows: torch.Tensor,
    active: ActiveSlots,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    q_indptr: torch.Tensor | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA attention over paged rows, computed in `dtype` (float32 or float64) throughout.

    q_nope [tokens, heads, kv_lora_rank]; q_pe [tokens, heads, qk_rope_head_dim] or None; rows [slots, the sum
    of both] FP8, BF16 or FP16. `q_indptr` int32 [bs + 1], from 0, never falling and at most `tokens`, bounds
    each request's query tokens (None: one each). They are its last: with `causal`, token j of n sees all but
    its n - 1 - j successors.
    Logits are `sm_scale * k_scale * q·k`, and `logit_cap * tanh(logits / logit_cap)` where logit_cap > 0.
    Values are the first kv_lora_rank of each row times k_scale. Returns `out` [tokens, heads, kv_lora_rank]
    and `lse` [tokens, heads], natural logarithm, both of `dtype`. A token that sees nothing: out 0, lse -inf.
    """
    source = rows_2d("rows", rows, _ROWS)
    expect_active(active, source.device)
    one_of("dtype", dtype, _COMPUTED_IN)
    sm_scale, k_scale = number("sm_scale", sm_scale), number("k_scale", k_scale)
    logit_cap = number("logit_cap", logit_cap)
    expect("q_nope", q_nope, "[tokens, heads, kv_lora_rank]", dims=3, device=source.device)
    tokens, heads, rank = q_nope.shape
    if q_pe is not None:
        expect(
            "q_pe",
            q_pe,
            f"[{tokens}, {heads}, qk_rope_head_dim]",
            sizes=(tokens, heads, None),
            device=source.device,
        )
    width = rank + (0 if q_pe is None else q_pe.shape[2])
    if source.shape[1] != width:
        raise BadInput(f"rows: expected [slots, {width}], as wide as q_nope and q_pe, got {described(rows)}")
    if q_indptr is None:
        if tokens != active.batch:
            raise BadInput(f"q_nope: expected one token a request, {active.batch} of them, got {tokens}")
        q_bounds = list(range(tokens + 1))
    else:
        expect(
            "q_indptr", q_indptr, f"[{active.batch + 1}]", dtypes=(torch.int32,), sizes=(active.batch + 1,)
        )
        q_bounds = q_indptr.tolist()
        if q_bounds[0] or q_bounds != sorted(q_bounds) or q_bounds[-1] > tokens:
            raise BadInput(f"q_indptr: expected it to grow from 0 to {tokens} at most, got {q_bounds}")

    q = q_nope if q_pe is None else torch.cat([q_nope, q_pe], dim=-1)
    out = torch.zeros(tokens, heads, rank, dtype=dtype, device=source.device)
    lse = torch.full((tokens, heads), -math.inf, dtype=dtype, device=source.device)
    for b, slots in enumerate(active.slots()):
        first, last = q_bounds[b], q_bounds[b + 1]
        n, length = last - first, slots.numel()
        if not n or not length or not source.shape[0]:
            continue
        is_slot = (slots >= 0) & (slots < source.shape[0])
        k = _take(source, torch.where(is_slot, slots, 0)).to(dtype) * k_scale
        # A row that is masked weighs nothing, also where its bytes are NaN.
        k = torch.where(is_slot[:, None], k, 0)
        logits = torch.einsum("nhd,ld->nhl", q[first:last].to(dtype), k) * sm_scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        position = torch.arange(length, device=source.device)
        sees = is_slot[None].expand(n, length)
        if causal:
            end = length - n + torch.arange(n, device=source.device)
            sees = sees & (position[None] <= end[:, None])
        logits = logits.masked_fill(~sees[:, None], -math.inf)
        norm = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - norm.masked_fill(norm.isneginf(), 0)[..., None])
        out[first:last] = torch.einsum("nhl,ld->nhd", weights, k[:, :rank])
        lse[first:last] = norm
    return out, lse


def _tokens_used(active: ActiveSlots, entries: list[torch.Tensor]) -> list[torch.Tensor]:
    """How many tokens of each entry its request reads: 1 when ragged, up to page_size when paged."""
    if not active.is_paged:
        return [torch.ones_like(e) for e in entries]
    size = active.page_size
    return [
        (n - size * torch.arange(e.numel(), device=e.device)).clamp(max=size)
        for e, n in zip(entries, active.bounds.tolist(), strict=True)
    ]


def _take(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows by slot. Through bytes: torch indexes no FP8 tensors on some devices."""
    if rows.dtype in FP8_DTYPES:
        return rows.view(torch.uint8)[slots].view(rows.dtype)
    return rows[slots]
