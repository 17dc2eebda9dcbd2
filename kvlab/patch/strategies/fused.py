"""No wide rows at all: kvlab's split-KV decode reads the FP8 rows and converts them in registers.

Its rounding differs from stock's as one attention kernel's does from another's; `exact` never takes it.
"""

import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.patch import casts
from kvlab.patch.policy import Facts
from kvlab.patch.strategies.base import Call, TakeOver


class Fused:
    name = "fused"
    is_exact = False

    def refusal(self, facts: Facts) -> str | None:
        if facts.kind != "decode":
            return "decode only"
        if facts.heads is None or facts.rank is None:
            return "heads not known yet"
        return unsupported(facts)

    def enter(self, call: Call) -> None:
        return

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if call.reads.is_cascade:
            raise RuntimeError("cascade attention merges two results")
        raise TakeOver(lambda: self._attend(call, rows))

    def _attend(self, call: Call, rows: torch.Tensor) -> torch.Tensor:
        layer = call.layer
        heads, rank = layer.tp_q_head_num, layer.v_head_dim
        if call.q_rope is not None:
            q_nope = call.q.view(-1, heads, rank)
            q_pe = call.q_rope.view(-1, heads, layer.head_dim - rank)
        else:
            both = call.q.reshape(-1, heads, layer.head_dim)
            q_nope, q_pe = both[..., :rank], both[..., rank:]
        # flashinfer's MLA kernel has no soft cap: stock does not apply one there.
        cap = layer.logit_cap if call.facts.family == "fa3" else 0.0
        out = attend(q_nope, q_pe, rows, call.reads.tables[0], sm_scale=layer.scaling, logit_cap=cap or 0.0)
        return out.reshape(-1, heads * rank)


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    rows: torch.Tensor,
    active: ActiveSlots,
    *,
    sm_scale: float,
    logit_cap: float,
) -> torch.Tensor:
    """[tokens, heads, rank] of q's dtype."""
    if casts.on_device(rows.device):
        from kvlab.kernels import decode

        return decode.mla_decode(q_nope, q_pe, rows, active, sm_scale=sm_scale, logit_cap=logit_cap)[0]
    from kvlab.kernels import reference

    out, _ = reference.mla_attention(q_nope, q_pe, rows, active, sm_scale=sm_scale, logit_cap=logit_cap)
    return out.to(q_nope.dtype)


def unsupported(facts: Facts) -> str | None:
    """Why the decode kernel takes no such rows here, or None."""
    if not casts.on_device(facts.device):
        return None
    try:
        from kvlab.kernels import decode
    except ImportError as e:
        return f"the decode kernel does not import: {e}"
    ask = getattr(decode, "supports", None)
    if ask is None:
        return None
    return ask(
        heads=facts.heads,
        kv_lora_rank=facts.rank,
        qk_rope_head_dim=facts.width - facts.rank,
        dtype=facts.q_dtype,
        kv_dtype=facts.fp8,
        device=facts.device,
    )
