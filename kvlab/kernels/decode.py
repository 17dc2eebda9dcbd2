"""How does a decode step attend over FP8 rows without casting them? `mla_decode`, and who computes it.

On Hopper the CUDA kernels of `kvlab.kernels.hopper`, where they take the call and were measured to be the
faster ones (`kvlab.kernels.choice`); everywhere else the Triton kernels of `kvlab.kernels.mla_triton` (SM80
to SM120). Both equal
`kvlab.kernels.reference.mla_attention`, read lengths on the device and never wait for it, so one captured
CUDA graph serves every length.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kvlab.errors import BadInput
from kvlab.kernels import choice
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.checks import WIDE_DTYPES, described, expect, rows_2d
from kvlab.kernels.chip import chip, early_launch
from kvlab.kernels.mla_merge import kvlab_mla_merge
from kvlab.kernels.mla_record import RECORD
from kvlab.kernels.mla_triton import kvlab_mla_decode

BACKENDS = ("auto", "triton", "cuda")
MAX_HEADS = 128
MAX_LATENT = 512
MAX_ROPE = 64
# Few registers matter more to the merge than the speed of the float32 columns that it hardly ever computes.
MERGE_WARPS, MERGE_STAGES, WIDE_TILE = 2, 2, 2
# The CUDA kernels keep tickets at a workspace's start that every call must leave zero.
_HEADER_BYTES = 8192
_SMALL_SHARED = (86, 89, 120, 121)

_log = logging.getLogger(__name__)
# Devices where the CUDA kernels turned out not to compile, and why: Triton serves them from then on.
_cuda_failed: dict[torch.device, str] = {}


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
    request's query tokens, its last ones (None: one each); with `causal` they see what came before them.
    A query's values count to 2^-30 of its largest in CUDA, wholly in Triton, which turns to float32 there.
    Logits are `sm_scale * k_scale * q·k`, capped as `logit_cap * tanh(logits / logit_cap)` where logit_cap is
    positive; values are scaled by k_scale.

    Returns `out` [tokens, heads, kv_lora_rank] of Q's dtype, and `lse` float32 [tokens, heads] where `lse` is
    given or `return_lse` asks for it (natural logarithm; base 2, as flashinfer has it, with `lse_base2`),
    else None. A token that sees nothing: out 0, lse -inf. Results are the same bits each time.

    `workspace` from `workspace_for` avoids an allocation; calls that run at once on different streams need
    their own. `backend` "triton" or "cuda" insists on one. `keep` gets a CUDA kernel's launch (`Layers`).
    Raises BadInput naming the argument that is wrong.
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
    if not isinstance(active, ActiveSlots):
        raise BadInput(f"active: expected ActiveSlots, got {type(active).__name__}")
    if active.device != device:
        raise BadInput(f"active: wrong device; expected tensors on {device}, got {described(active.table)}")
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
    if not tokens:
        return out, lse
    if not active.batch:
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
    if _picks_cuda(backend, q_nope, q_pe, pool, active, _columns(tokens, heads, active.batch)):
        from kvlab.kernels import hopper, nvrtc

        try:
            return hopper.mla_decode(q_nope, q_pe, pool, active, **options, keep=keep)
        except nvrtc.CompileError as e:
            if backend == "cuda":
                raise
            _cuda_failed[device] = f"the CUDA kernels do not compile here: {e}"
            _log.warning("kvlab: Triton decodes, %s", _cuda_failed[device])
    _launch(q_nope, q_pe, pool, active, tune=tune, **options)
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


def workspace_bytes(
    tokens: int,
    heads: int,
    device: torch.device,
    *,
    batch: int | None = None,
    kv_lora_rank: int = 512,
    tune: Tuning | None = None,
) -> int:
    """Bytes of scratch for `tokens` query tokens of `batch` requests (None: one each) on `device`."""
    capability, sms = chip(device)
    columns = _columns(tokens, heads, batch or tokens)
    tune = tune or tuning(capability, columns, batch or tokens)
    need = sum(_sections(tokens, heads, kv_lora_rank, sms, tune))
    if capability == 90:
        from kvlab.kernels import hopper

        need = max(need, *(hopper.workspace_bytes(device, c) for c in (heads, columns)))
    return need


def workspace_for(
    tokens: int,
    heads: int,
    device: torch.device,
    *,
    batch: int | None = None,
    kv_lora_rank: int = 512,
    tune: Tuning | None = None,
) -> torch.Tensor:
    """Scratch for `mla_decode`, uint8, for up to `tokens` query tokens; calls in sequence may share it."""
    need = workspace_bytes(tokens, heads, device, batch=batch, kv_lora_rank=kv_lora_rank, tune=tune)
    return torch.zeros(need, dtype=torch.uint8, device=device)


def why_not_cuda(
    q_nope: torch.Tensor, q_pe: torch.Tensor | None, rows: torch.Tensor, active: ActiveSlots
) -> str | None:
    """Why the CUDA kernels do not take this call; None where they do. Which is faster: kernels.choice."""
    if not _is_cuda(rows.device):
        return f"rows are on {rows.device}"
    if chip(rows.device)[0] != 90:
        return f"the CUDA kernels are for SM90, this is SM{chip(rows.device)[0]}"
    if rows.device in _cuda_failed:
        return _cuda_failed[rows.device]
    from kvlab.kernels import hopper

    return hopper.supports(q_nope, q_pe, rows_2d("rows", rows), active)


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _picks_cuda(
    backend: str,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    pool: torch.Tensor,
    active: ActiveSlots,
    columns: int,
) -> bool:
    if backend not in BACKENDS:
        raise BadInput(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "triton":
        return False
    reason = why_not_cuda(q_nope, q_pe, pool, active)
    if backend == "cuda":
        if reason:
            raise BadInput(f"backend: cuda does not take this call: {reason}; use auto or triton")
        return True
    return reason is None and choice.prefer(columns, active.batch, active.capacity // active.batch) == "cuda"


def _check_sizes(q_nope: torch.Tensor, heads: int, rank: int, rope: int) -> None:
    if not 1 <= heads <= MAX_HEADS:
        raise BadInput(f"q_nope: expected 1 to {MAX_HEADS} heads, got {described(q_nope)}")
    if not 32 <= rank <= MAX_LATENT or rank % 2:
        raise BadInput(
            f"q_nope: expected an even kv_lora_rank of 32 to {MAX_LATENT}, got {described(q_nope)}"
        )
    if rope > MAX_ROPE or rope % 2:
        raise BadInput(f"q_pe: expected an even qk_rope_head_dim of at most {MAX_ROPE}, got {rope}")


def _columns(tokens: int, heads: int, batch: int) -> int:
    """Query columns a request: its heads times its query tokens, rounded up."""
    return heads * max(1, -(-tokens // max(batch, 1)))


def _sections(tokens: int, heads: int, rank: int, sms: int, tune: Tuning) -> tuple[int, ...]:
    """Bytes of the workspace's parts: header, records, pieces' LSE, pieces."""
    pieces = 2 * sms * tune.shares * tune.block_h
    records = 4 * RECORD * tokens * -(-heads // tune.block_h)
    return (
        _HEADER_BYTES,
        -(-records // 256) * 256,
        -(-4 * pieces // 256) * 256,
        8 * pieces * _pairs_held(rank),
    )


def _pairs_held(width: int) -> int:
    """Pairs of columns as the power of two that a Triton block needs, and a dot at least 16."""
    return max(16, triton.next_power_of_2(width // 2))


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


def _merge_cut(columns: int, pairs: int) -> tuple[int, int]:
    """Pairs of a column that a program of the merge takes, and pieces it reads at once.

    Few columns may each have hundreds of pieces, so they are cut fine; many columns have few.
    """
    chunk = 16
    while chunk < pairs and columns * (pairs // chunk) > 2048:
        chunk *= 2
    return chunk, max(4, 1024 // chunk)


def _launch(
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
    """Two kernels: shares of the batch's tiles, then the merge of what was cut."""
    device = pool.device
    tokens, heads, rank = q_nope.shape
    capability, sms = chip(device)
    tune = tune or tuning(capability, _columns(tokens, heads, active.batch), active.batch)
    sections = _sections(tokens, heads, rank, sms, tune)
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
        "PAIRS": _pairs_held(rank),
        "ROPE": q_rope // 2,
        "ROPE_PAIRS": _pairs_held(q_rope),
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
    chunk, at_once = _merge_cut(blocks * lanes, _pairs_held(rank))
    launch = early_launch(tune.pdl)
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
        **launch,
    )
    kvlab_mla_merge[(blocks, lanes, triton.cdiv(rank // 2, chunk))](
        *shared,
        **constants,
        CHUNK=chunk,
        PIECES=at_once,
        STAGES=MERGE_STAGES,
        WIDE_TILE=WIDE_TILE,
        num_warps=MERGE_WARPS,
        **launch,
    )
