"""Which specialisations of the decode kernels does a chip get? For kvlab.kernels.aot to compile."""

from kvlab.kernels.aot import Spec
from kvlab.kernels.decode_cut import MERGE_STAGES, MERGE_WARPS, WIDE_TILE, Tuning, tuning

_POINTERS = {
    "q_nope": "*u32",
    "q_pe": "*u32",
    "rows": "*u16",
    "table": "*i32",
    "bounds": "*i32",
    "q_indptr": "*i32",
    "part_out": "*fp32",
    "part_lse": "*fp32",
    "records": "*i32",
    "lse": "*fp32",
}
_SIZES = ("batch", "limit", "num_slots", "row_stride", "table_stride")
_STRIDES = ("qn_token", "qn_head", "qp_token", "qp_head", "out_token", "out_head")
_SCALES = ("logit_scale", "value_scale", "cap2", "lse_unit")
# What the launcher finds divisible by 16 for SGLang's rows of 576 bytes and contiguous queries.
_DIVISIBLE = [*_POINTERS, "out", "row_stride", *_STRIDES]


def specs(
    capability: int,
    heads: int,
    *,
    batch: int = 64,
    e5m2: bool = False,
    page_size: int = 0,
    ragged_q: bool = False,
    tune: Tuning | None = None,
) -> list[Spec]:
    """The decode and the merge kernel as `mla_decode` launches them: BF16 queries, kv_lora_rank 512, rope 64.

    `page_size` 0 is token-level; `ragged_q` several query tokens a request.
    """
    tune = tune or tuning(capability, heads, batch)
    signature = (
        _POINTERS
        | {"out": "*bf16"}
        | dict.fromkeys((*_SIZES, *_STRIDES), "i32")
        | dict.fromkeys(_SCALES, "fp32")
    )
    constants = {
        "HEADS": heads,
        "BLOCK_H": tune.block_h,
        "LATENT": 256,
        "PAIRS": 256,
        "ROPE": 32,
        "ROPE_PAIRS": 32,
        "PAGE_SIZE": page_size,
        "RAGGED_Q": ragged_q,
        "CAUSAL": ragged_q,
        "CAPPED": False,
        "WITH_LSE": True,
        "BF16": True,
        "E5M2": e5m2,
        "PDL": tune.pdl,
    }
    of_decode = {
        "TILE": tune.tile,
        "BATCH": 128,
        "METHOD": tune.method,
        "STAGES": tune.stages,
        "SHALLOW": tune.shallow,
    }
    of_merge = {"CHUNK": 16, "PIECES": 64, "STAGES": MERGE_STAGES, "WIDE_TILE": WIDE_TILE}
    name = f"sm_{capability} {heads} heads"
    return [
        Spec(
            name=f"{name}: decode",
            kernel="kvlab.kernels.mla_triton:kvlab_mla_decode",
            signature=signature | {"min_tiles": "i32"},
            constexprs=constants | of_decode,
            divisible=_DIVISIBLE,
            num_warps=tune.warps,
            num_stages=3,
        ),
        Spec(
            name=f"{name}: merge",
            kernel="kvlab.kernels.mla_merge:kvlab_mla_merge",
            signature=signature,
            constexprs=constants | of_merge,
            divisible=_DIVISIBLE,
            num_warps=MERGE_WARPS,
            num_stages=3,
        ),
    ]
