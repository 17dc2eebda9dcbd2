"""Who else can attend over these rows? Each row of the attention benchmark as a call a layer.

A builder takes a `Problem`, does what a server does once a step (plans, splits, maps), and returns what it
does once a layer. One that is not installed raises `Absent`; any other exception is the benchmark's to name.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvlab.kernels.active import ActiveSlots

LATENT, ROPE = 512, 64
FLASHMLA_PAGE = 64
_FLASHINFER_SCRATCH = 384 << 20  # bytes, SGLang 0.5.15.post1's SGLANG_FLASHINFER_WORKSPACE_SIZE
_SGLANG_MIN_BLOCK = 32  # tokens a split at least, SGLang 0.5.15.post1 triton_backend.py

Call = Callable[[int], torch.Tensor]


class Absent(Exception):
    """The library is not installed, or cannot load here."""


@dataclass
class Problem:
    """One decode step's attention, a pool a layer. Slots come in pages of 64, so that every row can run.

    q_nope [bs, heads, 512] and q_pe [bs, heads, 64] BF16; `rows` and `wide`, per layer, [slots, 1, 576] FP8
    and the same rows in BF16; `shadow` is scratch of that shape; `table` [bs, pages] of pages of 64.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    rows: list[torch.Tensor]
    wide: list[torch.Tensor]
    shadow: torch.Tensor
    active: ActiveSlots
    lengths: list[int]
    table: torch.Tensor
    sm_scale: float
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.q_nope.shape[0]

    @property
    def heads(self) -> int:
        return self.q_nope.shape[1]

    @property
    def device(self) -> torch.device:
        return self.q_nope.device


def stock(p: Problem) -> Call:
    run = _flashinfer(p, "fa3", torch.bfloat16)
    return lambda layer: run(p.rows[layer].to(torch.bfloat16))


def gather(p: Problem) -> Call:
    from kvlab.kernels.cast import gather_cast, map_workspace, slot_map

    slots = p.rows[0].shape[0]
    found = slot_map(p.active, slots, map_workspace(p.active, slots))
    run = _flashinfer(p, "fa3", torch.bfloat16, found.new_indices)

    def call(layer: int) -> torch.Tensor:
        gather_cast(p.rows[layer], p.shadow, found)
        return run(p.shadow)

    return call


def shadow(p: Problem) -> Call:
    from kvlab.kernels.cast import shadow_cast

    run = _flashinfer(p, "fa3", torch.bfloat16)

    def call(layer: int) -> torch.Tensor:
        shadow_cast(p.rows[layer], p.shadow, p.active)
        return run(p.shadow)

    return call


def fused(p: Problem, backend: str = "auto") -> Call:
    from kvlab.kernels.decode import mla_decode, workspace_for

    workspace = workspace_for(p.batch, p.heads, p.device)
    out = torch.empty_like(p.q_nope)

    def call(layer: int) -> torch.Tensor:
        return mla_decode(
            p.q_nope,
            p.q_pe,
            p.rows[layer],
            p.active,
            sm_scale=p.sm_scale,
            out=out,
            workspace=workspace,
            backend=backend,
        )[0]

    return call


def fused_triton(p: Problem) -> Call:
    return fused(p, "triton")


def fused_cuda(p: Problem) -> Call:
    from kvlab.kernels.decode import why_not_cuda

    reason = why_not_cuda(p.q_nope, p.q_pe, p.rows[0], p.active)
    if reason is not None:
        raise Absent(reason)
    return fused(p, "cuda")


def control_bf16(p: Problem) -> Call:
    run = _flashinfer(p, "fa3", torch.bfloat16)
    return lambda layer: run(p.wide[layer])


def native_fp8_fa3(p: Problem) -> Call:
    run = _flashinfer(p, "fa3", p.rows[0].dtype)
    return lambda layer: run(p.rows[layer])


def native_fp8_fa2(p: Problem) -> Call:
    run = _flashinfer(p, "fa2", p.rows[0].dtype)
    return lambda layer: run(p.rows[layer])


def _flashinfer(
    p: Problem, backend: str, dtype: torch.dtype, indices: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """flashinfer's MLA wrapper as SGLang plans it: page size 1, token-level indices."""
    wrapper_class = _load("flashinfer.mla", "BatchMLAPagedAttentionWrapper")
    if "flashinfer" not in p.scratch:
        p.scratch["flashinfer"] = torch.empty(_FLASHINFER_SCRATCH, dtype=torch.int8, device=p.device)
    wrapper = wrapper_class(p.scratch["flashinfer"], backend=backend)
    lengths = torch.tensor(p.lengths, dtype=torch.int32, device=p.device)
    wrapper.plan(
        torch.arange(p.batch + 1, dtype=torch.int32, device=p.device),
        p.active.bounds,
        p.active.table if indices is None else indices,
        lengths,
        p.heads,
        LATENT,
        ROPE,
        1,
        False,
        p.sm_scale,
        p.q_nope.dtype,
        dtype,
    )
    out = torch.empty_like(p.q_nope)
    scales = {} if dtype == torch.bfloat16 else {"ckv_scale": 1.0, "kpe_scale": 1.0}

    def run(rows: torch.Tensor) -> torch.Tensor:
        wrapper.run(p.q_nope, p.q_pe, rows[..., :LATENT], rows[..., LATENT:], out=out, **scales)
        return out

    return run


def sglang_triton(p: Problem) -> Call:
    decode = _load("sglang.srt.layers.attention.triton_ops.decode_attention", "decode_attention_fwd")
    count = _load("sglang.srt.layers.attention.triton_ops.metadata", "get_num_kv_splits_triton")
    sms = torch.cuda.get_device_properties(p.device).multi_processor_count
    most = max(8, min(_power_of_2(sms), _power_of_2(-(-max(p.lengths) // _SGLANG_MIN_BLOCK))))
    splits = torch.empty(p.batch, dtype=torch.int32, device=p.device)
    lengths = torch.tensor(p.lengths, dtype=torch.int32, device=p.device)
    count[(1,)](
        splits, lengths, p.batch, 1, p.heads, 1, most, sms, MAX_NUM_SEQ=max(256, _power_of_2(p.batch))
    )
    q = torch.cat([p.q_nope, p.q_pe], dim=-1)
    out = torch.empty_like(p.q_nope)
    logits = torch.empty(p.batch, p.heads, most, LATENT, dtype=torch.float32, device=p.device)
    lse = torch.empty(p.batch, p.heads, most, dtype=torch.float32, device=p.device)

    def call(layer: int) -> torch.Tensor:
        rows = p.rows[layer]
        decode(
            q,
            rows,
            rows[..., :LATENT],
            out,
            p.active.bounds,
            p.active.table,
            logits,
            lse,
            splits,
            most,
            p.sm_scale,
            1.0,
            1.0,
            has_mla=True,
        )
        return out

    return call


def flashmla_fp8(p: Problem) -> Call:
    attend = _load("sgl_kernel.flash_mla", "flash_mla_with_kvcache")
    metadata = _load("sgl_kernel.flash_mla", "get_mla_metadata")
    lengths = torch.tensor(p.lengths, dtype=torch.int32, device=p.device)
    plan, splits = metadata(lengths, p.heads, 1, is_fp8_kvcache=True)
    one = torch.ones(1, dtype=torch.float32, device=p.device)
    q = torch.cat([p.q_nope, p.q_pe], dim=-1)[:, None]

    def call(layer: int) -> torch.Tensor:
        out, _ = attend(
            q=q.to(p.rows[layer].dtype),
            k_cache=p.rows[layer].view(-1, FLASHMLA_PAGE, 1, LATENT + ROPE),
            block_table=p.table,
            cache_seqlens=lengths,
            head_dim_v=LATENT,
            tile_scheduler_metadata=plan,
            num_splits=splits,
            softmax_scale=p.sm_scale,
            causal=True,
            descale_q=one,
            descale_k=one,
        )
        return out.view(p.q_nope.shape)

    return call


BUILDERS: dict[str, Callable[[Problem], Call]] = {
    f.__name__: f
    for f in (
        stock,
        gather,
        shadow,
        fused,
        fused_triton,
        fused_cuda,
        control_bf16,
        native_fp8_fa3,
        native_fp8_fa2,
        sglang_triton,
        flashmla_fp8,
    )
}


def _load(module: str, name: str) -> Callable:
    library = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as e:
        raise Absent(f"{library} is not installed" if e.name == library else f"{library}: {e}") from None
    except (ImportError, OSError, AttributeError) as e:
        raise Absent(f"{library} does not load here: {first_line(e)}") from None


def first_line(e: BaseException) -> str:
    """An exception in one line, for a table's note."""
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text[:160]}" if text else type(e).__name__


def _power_of_2(n: int) -> int:
    return 1 << math.ceil(math.log2(max(n, 1)))
