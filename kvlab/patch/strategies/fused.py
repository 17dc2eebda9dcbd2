"""No wide rows at all: kvlab's split-KV decode reads the FP8 rows and converts them in registers.

Its rounding differs from stock's as one attention kernel's does from another's; `exact` never takes it.
"""

import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.patch import casts
from kvlab.patch.policy import Facts
from kvlab.patch.strategies.base import Call, Plain, TakeOver, Unfit


class Fused(Plain):
    name = "fused"
    is_exact = False
    takes_over = True

    def __init__(self) -> None:
        # By device and lane. Captured graphs keep their addresses: an outgrown one is kept too.
        self._workspaces: dict[tuple[torch.device, str], list[torch.Tensor]] = {}

    def refusal(self, facts: Facts) -> str | None:
        if facts.kind != "decode":
            return "decode only"
        if facts.heads is None or facts.rank is None:
            return "heads not known yet"
        return unsupported(facts)

    def note(self, facts: Facts) -> str | None:
        return uncompiled(facts)

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if call.reads.is_cascade:
            raise Unfit("cascade attention merges two results")
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
        cap = (layer.logit_cap if call.facts.family == "fa3" else 0.0) or 0.0
        active, workspace = call.reads.tables[0], self._workspace(call, q_nope)
        if workspace is None:
            out = attend(q_nope, q_pe, rows, active, sm_scale=layer.scaling, logit_cap=cap)
        else:
            layers = call.kept.get("layers")
            if layers is None:
                layers = call.kept["layers"] = casts.kernels("decode").Layers()
            out = layers(
                q_nope, q_pe, rows, active, sm_scale=layer.scaling, logit_cap=cap, workspace=workspace
            )
        return out.reshape(-1, heads * rank)

    def _workspace(self, call: Call, q_nope: torch.Tensor) -> torch.Tensor | None:
        """The kernel's scratch. Under graphs made at a warm-up call and kept, and a capture that outgrows it
        gets its own; without them made for a pass and gone with it: an extend step finds the memory free.
        """
        device = q_nope.device
        if device.type != "cuda":
            return None
        tokens, heads, rank = q_nope.shape
        decode = casts.kernels("decode")
        if not call.lasts:
            found = call.kept.get("workspace")
            if found is None or found[0] < tokens:
                made = decode.workspace_for(tokens, heads, device, kv_lora_rank=rank)
                found = call.kept["workspace"] = tokens, made
            return found[1]
        need = decode.workspace_bytes(tokens, heads, device, kv_lora_rank=rank)
        kept = self._workspaces.setdefault((device, call.lane), [])
        if kept and kept[-1].numel() >= need:
            return kept[-1]
        if call.is_capturing:
            return None
        kept.append(decode.workspace_for(tokens, heads, device, kv_lora_rank=rank))
        return kept[-1]


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    rows: torch.Tensor,
    active: ActiveSlots,
    *,
    sm_scale: float,
    logit_cap: float,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, rank] of q's dtype."""
    if casts.on_device(rows.device):
        from kvlab.kernels import decode

        return decode.mla_decode(
            q_nope, q_pe, rows, active, sm_scale=sm_scale, logit_cap=logit_cap, workspace=workspace
        )[0]
    from kvlab.kernels import reference

    out, _ = reference.mla_attention(q_nope, q_pe, rows, active, sm_scale=sm_scale, logit_cap=logit_cap)
    return out.to(q_nope.dtype)


def uncompiled(facts: Facts) -> str | None:
    """Why the kernels that are made for this chip cannot be had and Triton's decode, or None."""
    if facts.device.type != "cuda" or torch.cuda.get_device_capability(facts.device) != (9, 0):
        return None
    from kvlab.kernels import nvrtc

    try:
        nvrtc.library()
    except nvrtc.CompileError as e:
        return f"Triton's kernels decode, the CUDA kernels for this chip do not compile: {e}"
    return None


def unsupported(facts: Facts) -> str | None:
    """Why the decode kernel takes no such rows here, or None."""
    if not casts.on_device(facts.device):
        return None
    try:
        from kvlab.kernels import decode
    except ImportError as e:
        return f"the decode kernel does not import: {e}"
    rope = facts.width - facts.rank
    if facts.heads > decode.MAX_HEADS or facts.rank > decode.MAX_LATENT or rope > decode.MAX_ROPE:
        return (
            f"the decode kernel takes {decode.MAX_HEADS} heads of {decode.MAX_LATENT} + {decode.MAX_ROPE}, "
            f"not {facts.heads} of {facts.rank} + {rope}"
        )
    if facts.device.type == "cuda" and torch.cuda.get_device_capability(facts.device) < (8, 0):
        return "the decode kernel needs SM80"
    return None
