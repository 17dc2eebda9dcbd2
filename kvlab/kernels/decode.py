"""How does a decode step attend over FP8 rows without casting them? `mla_decode`, and `Layers` of a step.

On Hopper the CUDA kernels of `kvlab.kernels.hopper` compute it, where they take the call
(`kvlab.kernels.decode_backend`) and were measured to be the faster ones (`kvlab.kernels.choice`); everywhere
else, SM80 to SM120, the Triton kernels of `kvlab.kernels.mla_triton`. Both equal
`kvlab.kernels.reference.mla_attention`, read lengths on the device and never wait for it, so one captured
CUDA graph serves every length.
"""

import math
from typing import Any

import torch

from kvlab.errors import BadInput
from kvlab.kernels import mla_launch
from kvlab.kernels.active import ActiveSlots, expect_active
from kvlab.kernels.checks import WIDE_DTYPES, described, expect, number, rows_2d
from kvlab.kernels.decode_backend import leave_to_triton, picks_cuda, why_not_cuda
from kvlab.kernels.decode_cut import Tuning, columns_of
from kvlab.kernels.decode_workspace import workspace_bytes, workspace_for

__all__ = [
    "MAX_HEADS",
    "MAX_LATENT",
    "MAX_ROPE",
    "Layers",
    "Tuning",
    "mla_decode",
    "why_not_cuda",
    "workspace_bytes",
    "workspace_for",
]

MAX_HEADS = 128
MAX_LATENT = 512
MAX_ROPE = 64
# A capped logit is computed as cap - 2 cap / (1 + 2^x) in float32, whose rounding grows with the cap.
LEAST_CAP, MOST_CAP = 1e-6, 1e3


def mla_decode(
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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base2: bool = False,
    workspace: torch.Tensor | None = None,
    backend: str = "auto",
    tune: Tuning | None = None,
    keep: list[Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Absorbed MLA attention over paged FP8 rows that are never cast in memory.

    q_nope [tokens, heads, kv_lora_rank] BF16 or FP16, heads up to 128, kv_lora_rank even, up to 512; q_pe
    [tokens, heads, qk_rope_head_dim] of the same dtype, rope even, up to 64, or None. rows [slots,
    kv_lora_rank + qk_rope_head_dim] or [slots, 1, …], float8_e4m3fn or float8_e5m2, the row stride free but
    even. `active` names each request's slots; entries that are negative or past the pool are masked, and
    bytes of rows that no request reads have no effect, NaN included. `q_indptr` int32 [bs + 1] bounds each
    request's query tokens, its last ones (None: one each), from 0, never falling and at most `tokens`; with
    `causal` they see what came before them.
    A query's values count to 2^-30 of its largest in CUDA, wholly in Triton, which turns to float32 there.
    Logits are `sm_scale * k_scale * q·k`, capped as `logit_cap * tanh(logits / logit_cap)` where logit_cap is
    positive, then 1e-6 to 1,000; values are scaled by k_scale.

    Returns `out` [tokens, heads, kv_lora_rank] of Q's dtype, and `lse` float32 [tokens, heads] where `lse` is
    given or `return_lse` asks for it (natural logarithm; base 2, as flashinfer has it, with `lse_base2`),
    else None. A token that sees nothing: out 0, lse -inf. Results are the same bits each time.

    `out` and `lse` may not share memory with the queries, nor their rows with each other.
    `workspace` from `workspace_for` avoids an allocation; calls that run at once on different streams need
    their own. `backend` "triton" or "cuda" insists on one. `keep` gets a CUDA kernel's launch (`Layers`).
    Raises BadInput naming the argument that is wrong.
    """
    pool, q_pe, out, lse = _checked(q_nope, q_pe, rows, active, q_indptr, out, lse, return_lse, workspace)
    sm_scale, k_scale = number("sm_scale", sm_scale), number("k_scale", k_scale)
    logit_cap = _checked_cap(logit_cap)
    tokens, heads, _ = q_nope.shape
    if not tokens:
        return out, lse
    if not active.batch or not pool.shape[0]:
        return out.zero_(), None if lse is None else lse.fill_(-math.inf)

    options = {
        "sm_scale": sm_scale,
        "logit_cap": logit_cap,
        "k_scale": k_scale,
        "q_indptr": q_indptr,
        "causal": causal,
        "out": out,
        "lse": lse,
        "lse_base2": lse_base2,
        "workspace": workspace,
    }
    if picks_cuda(backend, q_nope, q_pe, pool, active, columns_of(tokens, heads, active.batch)):
        from kvlab.kernels import hopper, nvrtc

        try:
            return hopper.mla_decode(q_nope, q_pe, pool, active, **options, keep=keep)
        except nvrtc.CompileError as e:
            if backend == "cuda":
                raise
            leave_to_triton(pool.device, e)
    mla_launch.launch(q_nope, q_pe, pool, active, tune=tune, **options)
    return out, lse


class Layers:
    """`mla_decode` for the layers of one step: one query token a request, one workspace, no LSE.

    What was checked and chosen for a layer holds for the next one, whose tensors lie elsewhere and are laid
    out alike: it costs the host a launch. Where they are not, or Triton decodes, it is `mla_decode`.
    """

    def __init__(self) -> None:
        self._layout: tuple[Any, ...] | None = None
        self._active: ActiveSlots | None = None
        self._workspace: torch.Tensor | None = None
        self._launch: Any = None

    def __call__(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        rows: torch.Tensor,
        active: ActiveSlots,
        *,
        sm_scale: float,
        logit_cap: float,
        workspace: torch.Tensor,
    ) -> torch.Tensor:
        """[tokens, heads, kv_lora_rank] of Q's dtype. Arguments as `mla_decode`; all on one device."""
        layout = (
            *(q_nope.dtype, q_nope.shape, q_nope.stride(), q_pe.dtype, q_pe.shape, q_pe.stride()),
            *(rows.dtype, rows.shape, rows.stride(), sm_scale, logit_cap),
            *(active.table.data_ptr(), active.bounds.data_ptr()),
        )
        is_alike = active is self._active and workspace is self._workspace and layout == self._layout
        is_aligned = (q_nope.data_ptr() | q_pe.data_ptr() | rows.data_ptr()) % 16 == 0
        if is_alike and is_aligned and self._launch is not None:
            out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
            self._launch.again(q_nope, q_pe, rows, out)
            return out
        kept: list[Any] = []
        out, _ = mla_decode(
            q_nope,
            q_pe,
            rows,
            active,
            sm_scale=sm_scale,
            logit_cap=logit_cap,
            workspace=workspace,
            keep=kept,
        )
        self._layout, self._active, self._workspace = layout, active, workspace
        self._launch = kept[0] if kept else None
        return out


def _checked(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    rows: torch.Tensor,
    active: ActiveSlots,
    q_indptr: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """`rows` as [slots, row], `q_pe` (None where it has no columns), `out` and `lse`, allocated as asked for.

    Raises BadInput naming the argument that does not fit the others.
    """
    pool = rows_2d("rows", rows)
    device = pool.device
    expect("q_nope", q_nope, "[tokens, heads, kv_lora_rank]", dims=3, dtypes=WIDE_DTYPES, device=device)
    tokens, heads, rank = q_nope.shape
    if q_pe is not None:
        expect(
            "q_pe",
            q_pe,
            f"[{tokens}, {heads}, qk_rope_head_dim]",
            dtypes=(q_nope.dtype,),
            device=device,
            sizes=(tokens, heads, None),
        )
        if q_pe.shape[2] == 0:
            q_pe = None
    rope = 0 if q_pe is None else q_pe.shape[2]
    _check_sizes(q_nope, heads, rank, rope)
    expect("rows", pool, f"[slots, {rank + rope}], as wide as q_nope and q_pe", sizes=(None, rank + rope))
    expect_active(active, device)
    if q_indptr is None:
        if tokens != active.batch:
            raise BadInput(f"q_nope: expected one token a request, {active.batch} of them, got {tokens}")
    else:
        expect(
            "q_indptr",
            q_indptr,
            f"[{active.batch + 1}]",
            dtypes=(torch.int32,),
            device=device,
            sizes=(active.batch + 1,),
        )
    if out is None:
        out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=device)
    else:
        sizes = (tokens, heads, rank)
        expect("out", out, f"{list(sizes)} as q_nope", dtypes=(q_nope.dtype,), device=device, sizes=sizes)
        _check_apart(out, q_nope)
    if lse is None and return_lse:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    elif lse is not None:
        expect(
            "lse", lse, f"[{tokens}, {heads}]", dtypes=(torch.float32,), device=device, sizes=(tokens, heads)
        )
        if not lse.is_contiguous():
            raise BadInput(f"lse: expected a contiguous [{tokens}, {heads}], got strides {lse.stride()}")
    if workspace is not None:
        expect("workspace", workspace, "[bytes]", dims=1, dtypes=(torch.uint8,), device=device)
        if workspace.data_ptr() % 16:
            raise BadInput(
                "workspace: expected one that starts at a multiple of 16 bytes, "
                f"got {workspace.data_ptr() % 16} past one"
            )
    return pool, q_pe, out, lse


def _check_apart(out: torch.Tensor, q_nope: torch.Tensor) -> None:
    """Programs write rows of `out` while others still read queries: neither may lie on another."""
    if out.numel() and out.data_ptr() == q_nope.data_ptr():
        raise BadInput("out: expected memory of its own, got that of q_nope")
    tokens, heads, rank = out.shape
    (inner, inner_stride), (outer, outer_stride) = sorted(
        ((heads, out.stride(1)), (tokens, out.stride(0))), key=lambda d: d[1]
    )
    row = rank + (inner - 1) * inner_stride
    if (inner > 1 and inner_stride < rank) or (outer > 1 and outer_stride < row):
        raise BadInput(f"out: rows overlap in memory, its strides are {out.stride()}; expected rows apart")


def _checked_cap(logit_cap: float) -> float:
    found = number("logit_cap", logit_cap)
    if found > 0 and not LEAST_CAP <= found <= MOST_CAP:
        raise BadInput(f"logit_cap: expected 0 (none), or {LEAST_CAP:g} to {MOST_CAP:,.0f}, got {logit_cap}")
    return found


def _check_sizes(q_nope: torch.Tensor, heads: int, rank: int, rope: int) -> None:
    if not 1 <= heads <= MAX_HEADS:
        raise BadInput(f"q_nope: expected 1 to {MAX_HEADS} heads, got {described(q_nope)}")
    if not 32 <= rank <= MAX_LATENT or rank % 2:
        raise BadInput(
            f"q_nope: expected an even kv_lora_rank of 32 to {MAX_LATENT}, got {described(q_nope)}"
        )
    if rope > MAX_ROPE or rope % 2:
        raise BadInput(f"q_pe: expected an even qk_rope_head_dim of at most {MAX_ROPE}, got {rope}")
