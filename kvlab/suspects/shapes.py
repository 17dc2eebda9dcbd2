"""Which matrices does one rank multiply in a decode step?"""

import msgspec

from kvlab.errors import BadInput
from kvlab.models import MlaGeometry, rank

PARTS = ("attention", "dense", "shared", "router", "experts", "head")
"""Every part that has weights."""

MLP_PARTS = ("dense", "shared", "experts")
"""Those in the format of the experts; a checkpoint may keep the others in another."""


class Linear(msgspec.Struct, frozen=True, kw_only=True):
    """`times` a step, `groups` products of [m, k] by [k, n] at once.

    Groups are heads for the absorbed projections and distinct experts for the routed ones; `m` tokens each.
    A fraction is an expectation over the routing.
    """

    name: str
    part: str
    n: int
    k: int
    m: float
    groups: float
    times: int

    @property
    def weights(self) -> float:
        """Weights read in a step (a count)."""
        return self.n * self.k * self.groups * self.times

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, a multiply-add counted as two."""
        return 2 * self.m * self.weights


def distinct_experts(experts: int, top_k: int, batch: int) -> float:
    """Experts that at least one of `batch` tokens is sent to, expected, each token choosing evenly."""
    return experts * (1 - (1 - top_k / experts) ** batch)


def linears(geometry: MlaGeometry, *, tp: int, batch: int) -> list[Linear]:
    """The products of one of `tp` ranks, with kv_b absorbed into queries and outputs.

    Down-projections to the latent dimensions and the router are whole on every rank. Raises BadInput where
    the shape does not say its widths or heads do not divide by `tp`.
    """
    g = geometry
    for key in (
        "hidden_size",
        "vocab_size",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "first_k_dense_replace",
    ):
        if getattr(g, key) is None:
            raise BadInput(f"{g.name}: {key} is missing; without it the step cannot be counted")
    heads, layers, hidden = rank(g, tp=tp).heads, g.attention_layers, g.hidden_size
    dense = min(g.first_k_dense_replace, layers)
    moe = layers - dense
    qk = g.qk_nope_head_dim + g.qk_rope_head_dim
    found: list[Linear] = []

    def add(name: str, part: str, n: int, k: int, times: int, groups: float = 1, m: float = batch) -> None:
        if n and k and groups and times:
            found.append(Linear(name=name, part=part, n=n, k=k, m=m, groups=groups, times=times))

    if g.q_lora_rank:
        add("q_a and kv_a", "attention", g.q_lora_rank + g.latent_dim, hidden, layers)
        add("q_b", "attention", heads * qk, g.q_lora_rank, layers)
    else:
        add("kv_a", "attention", g.latent_dim, hidden, layers)
        add("q", "attention", heads * qk, hidden, layers)
    add("absorbed K", "attention", g.kv_lora_rank, g.qk_nope_head_dim, layers, heads)
    add("absorbed V", "attention", g.v_head_dim, g.kv_lora_rank, layers, heads)
    add("o", "attention", hidden, heads * g.v_head_dim, layers)
    for part, width, times in (
        ("dense", _split(g, "intermediate_size", tp), dense),
        ("shared", _split(g, "moe_intermediate_size", tp) * (g.n_shared_experts or 0), moe),
    ):
        add(f"{part} gate and up", part, 2 * width, hidden, times)
        add(f"{part} down", part, hidden, width, times)
    add("router", "router", g.n_routed_experts, hidden, moe)
    width = _split(g, "moe_intermediate_size", tp)
    groups = distinct_experts(g.n_routed_experts, g.num_experts_per_tok, batch)
    each = batch * g.num_experts_per_tok / groups
    add("experts gate and up", "experts", 2 * width, hidden, moe, groups, each)
    add("experts down", "experts", hidden, width, moe, groups, each)
    add("head", "head", -(-g.vocab_size // tp), hidden, 1)
    return found


def _split(geometry: MlaGeometry, key: str, tp: int) -> int:
    whole = getattr(geometry, key)
    if whole % tp:
        raise BadInput(f"--tp {tp}: {key} {whole} of {geometry.name} does not divide by it")
    return whole // tp
