"""How does a checked decode call reach the two Triton kernels? In units of pairs, cut for the chip."""

import math

import torch
import triton

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.chip import chip, early_launch
from kvlab.kernels.decode_cut import (
    MERGE_STAGES,
    MERGE_WARPS,
    WIDE_TILE,
    Tuning,
    columns_of,
    merge_cut,
    pairs_held,
    tuning,
)
from kvlab.kernels.decode_workspace import section_bytes
from kvlab.kernels.mla_merge import kvlab_mla_merge
from kvlab.kernels.mla_triton import kvlab_mla_decode


def launch(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    pool: torch.Tensor,
    active: ActiveSlots,
    *,
    sm_scale: float,
    logit_cap: float,
    k_scale: float,
    q_indptr: torch.Tensor | None,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    lse_base2: bool,
    workspace: torch.Tensor | None,
    tune: Tuning | None,
) -> None:
    """Shares of the batch's tiles, then the merge of what was cut; arguments as `mla_decode` checked them.

    Raises BadInput for a workspace that is too small, and for rows that do not start at a pair.
    """
    device = pool.device
    tokens, heads, rank = q_nope.shape
    capability, sms = chip(device)
    tune = tune or tuning(capability, columns_of(tokens, heads, active.batch), active.batch)
    sections = section_bytes(tokens, heads, rank, sms, tune)
    if workspace is None:
        workspace = torch.empty(sum(sections), dtype=torch.uint8, device=device)
    elif workspace.numel() < sum(sections):
        raise BadInput(f"workspace: expected at least {sum(sections)} bytes, got {workspace.numel()}")
    _, records, part_lse, part_out = workspace[: sum(sections)].split(sections)

    q_rope = 0 if q_pe is None else q_pe.shape[2]
    qn = _as_pairs("q_nope", q_nope, torch.uint32)
    qp = qn if q_pe is None else _as_pairs("q_pe", q_pe, torch.uint32)
    codes = _as_pairs("rows", pool, torch.uint16)
    page_size = active.page_size if active.is_paged else 0
    limit = active.table.shape[1] * page_size if page_size else active.table.numel()
    most = 2**31 - 1 - max(page_size, 1)
    log2e = 1 / math.log(2)
    shared = (
        qn,
        qp,
        codes,
        active.table,
        active.bounds,
        active.bounds if q_indptr is None else q_indptr,
        out,
        out if lse is None else lse,
        part_out.view(torch.float32),
        part_lse.view(torch.float32),
        records.view(torch.int32),
        active.batch,
        min(limit, most),
        min(pool.shape[0], most),
        codes.stride(0),
        active.table.stride(0) if active.is_paged else 0,
        qn.stride(0),
        qn.stride(1),
        qp.stride(0),
        qp.stride(1),
        out.stride(0),
        out.stride(1),
        sm_scale * k_scale * log2e,
        float(k_scale),
        logit_cap * log2e,
        1.0 if lse_base2 else math.log(2),
    )
    constants = {
        "HEADS": heads,
        "BLOCK_H": tune.block_h,
        "LATENT": rank // 2,
        "PAIRS": pairs_held(rank),
        "ROPE": q_rope // 2,
        "ROPE_PAIRS": pairs_held(q_rope),
        "PAGE_SIZE": page_size,
        "RAGGED_Q": q_indptr is not None,
        "CAUSAL": q_indptr is not None and causal,
        "CAPPED": logit_cap > 0,
        "WITH_LSE": lse is not None,
        "BF16": q_nope.dtype == torch.bfloat16,
        "E5M2": pool.dtype == torch.float8_e5m2,
        "PDL": tune.pdl,
    }
    blocks = tokens * -(-heads // tune.block_h)
    lanes = tune.block_h if q_indptr is not None else min(tune.block_h, heads)
    chunk, at_once = merge_cut(blocks * lanes, pairs_held(rank))
    early = early_launch(tune.pdl)
    kvlab_mla_decode[(sms * tune.shares,)](
        *shared,
        tune.min_tiles,
        **constants,
        TILE=tune.tile,
        BATCH=max(128, triton.next_power_of_2(active.batch)),
        METHOD=tune.method,
        STAGES=tune.stages,
        SHALLOW=tune.shallow,
        num_warps=tune.warps,
        **early,
    )
    kvlab_mla_merge[(blocks, lanes, triton.cdiv(rank // 2, chunk))](
        *shared,
        **constants,
        CHUNK=chunk,
        PIECES=at_once,
        STAGES=MERGE_STAGES,
        WIDE_TILE=WIDE_TILE,
        num_warps=MERGE_WARPS,
        **early,
    )


def _as_pairs(name: str, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same memory in units twice as wide. Raises BadInput where rows do not start on one."""
    size = 2 * t.element_size()
    if t.data_ptr() % size or any(s % 2 for s, n in zip(t.stride()[:-1], t.shape, strict=False) if n > 1):
        raise BadInput(
            f"{name}: expected rows that start at multiples of {size} bytes, "
            f"got strides {t.stride()} from {t.data_ptr() % size} past one"
        )
    shape = (*t.shape[:-1], t.shape[-1] // 2)
    strides = tuple(s // 2 if n > 1 else 0 for s, n in zip(t.stride()[:-1], t.shape, strict=False))
    flat = t.as_strided((1,), (1,)) if t.numel() == 0 else t.as_strided((2,), (1,))
    return flat.view(dtype).as_strided(shape, (*strides, 1))
