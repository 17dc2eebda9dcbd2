"""How many weight bytes does one token read? The floor under a decode step, counted from the model's shape.

Linear layers only: norms, biases and embeddings looked up by row are thousandths of them.
"""

from fractions import Fraction

import msgspec

from kvlab.errors import BadInput
from kvlab.models import MlaGeometry

# Bits of one weight. NVFP4 has four and an 8-bit scale for each 16 (NVIDIA ModelOpt, nvfp4 configuration).
FORMATS: dict[str, Fraction] = {
    "bf16": Fraction(16),
    "fp8": Fraction(8),
    "nvfp4": Fraction(4) + Fraction(8, 16),
}


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights (a count, not bytes) of a whole MLA + MoE model, by part.

    `replicated` is the part of `attention` that tensor parallelism does not divide: the down-projections to
    the latent dimensions. `expert` is one routed expert in one layer.
    """

    geometry: MlaGeometry
    attention: int
    replicated: int
    indexer: int
    dense: int
    shared: int
    router: int
    expert: int
    moe_layers: int
    head: int

    @property
    def active_experts(self) -> int:
        """Routed experts that one token reads, all layers."""
        return self.expert * self.moe_layers * (self.geometry.num_experts_per_tok or 0)

    @property
    def all_experts(self) -> int:
        """Routed experts, all of them."""
        return self.expert * self.moe_layers * (self.geometry.n_routed_experts or 0)

    @property
    def active(self) -> int:
        """Weights that one token reads; the indexer is left out, since a dense backend does not run it."""
        return self.attention + self.dense + self.shared + self.router + self.active_experts + self.head

    @property
    def total(self) -> int:
        """Weights of the model: experts, indexer and both embeddings included, MTP layers not."""
        return self.active - self.active_experts + self.all_experts + self.indexer + self.head

    def rank_bytes(self, *, tp: int, mlp: str, other: str, resident: bool = False) -> int:
        """Bytes that one of `tp` ranks reads for one token, or holds (`resident`).

        `mlp` is the format of experts and dense MLPs, `other` that of attention, router and head (FORMATS).
        Assumes that a token's experts spread evenly over the ranks.
        """
        for what in (mlp, other):
            if what not in FORMATS:
                raise BadInput(f"weights: {what!r} is none of {', '.join(FORMATS)}")
        experts = self.all_experts if resident else self.active_experts
        divided = self.attention - self.replicated + self.head
        replicated = self.replicated + self.router
        if resident:
            divided += self.head
            replicated += self.indexer
        bits = FORMATS[mlp] * Fraction(self.dense + self.shared + experts, tp)
        bits += FORMATS[other] * (Fraction(divided, tp) + replicated)
        return int(bits / 8)


def weights(geometry: MlaGeometry) -> Weights:
    """Count them. Raises BadInput naming the key that the config does not give."""
    g = geometry
    needed = ("hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts")
    for key in (*needed, "num_experts_per_tok", "first_k_dense_replace"):
        if getattr(g, key) is None:
            raise BadInput(f"{g.name}: {key} is missing; without it the weights cannot be counted")
    hidden, layers, heads = g.hidden_size, g.attention_layers, g.num_attention_heads
    qk = g.qk_nope_head_dim + g.qk_rope_head_dim
    q_in = g.q_lora_rank or hidden
    down = hidden * g.latent_dim + (hidden * g.q_lora_rank if g.q_lora_rank else 0)
    up = q_in * heads * qk + g.kv_lora_rank * heads * (g.qk_nope_head_dim + g.v_head_dim)
    indexer = 0
    if g.index_head_dim and g.index_n_heads:
        indexer = q_in * g.index_n_heads * g.index_head_dim + hidden * (g.index_head_dim + g.index_n_heads)
    expert = 3 * hidden * g.moe_intermediate_size
    moe = layers - g.first_k_dense_replace
    return Weights(
        geometry=g,
        attention=layers * (down + up + heads * g.v_head_dim * hidden),
        replicated=layers * down,
        indexer=layers * indexer,
        dense=g.first_k_dense_replace * 3 * hidden * g.intermediate_size,
        shared=moe * expert * (g.n_shared_experts or 0),
        router=moe * hidden * g.n_routed_experts,
        expert=expert,
        moe_layers=moe,
        head=g.vocab_size * hidden,
    )
