"""Which strategy serves which calls? Pure rules on facts that are the same after a restart and on every rank.

Nothing is timed at start-up: two ranks that time differently would choose differently. The costs are measured
ones, from recorded runs.

- `exact` (default) takes only what is bit-identical to stock: `shadow`; `gather` where a wide copy of one
  layer does not fit but one of the batch does; `stock` for pools so small that stock's cast costs less than a
  launch.
- `fast` takes `fused` for decode where the kernel supports the shape and passed its self-check, and what
  `exact` takes for the rest.
- a strategy's own name takes it wherever it can, and what `exact` takes elsewhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvlab import variables
from kvlab.errors import BadInput

POLICIES = ("exact", "fast")
STRATEGIES = ("shadow", "gather", "replan", "fused", "native", "stock")
CHOICES = (*POLICIES, *STRATEGIES, "off")
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

# Stock casts 495,552 slots in 827.8 us and one launch of the active-rows cast takes 5.4 us in the decode loop
# (data/recorded/h200-stock and its README): below this many slots stock's cast is the cheaper of the two.
SMALL_POOL_SLOTS = int(495_552 * 5.4 / 827.8)


@dataclass(frozen=True)
class Facts:
    """What a choice may depend on. `q_dtype` is what the rows are widened to."""

    kind: str
    device: Any
    slots: int
    width: int
    fp8: Any
    q_dtype: Any
    heads: int | None = None
    rank: int | None = None
    page_size: int = 1
    family: str = "flashinfer_mla"

    @property
    def row_bytes(self) -> int:
        return self.width * self.fp8.itemsize

    @property
    def layer_bytes(self) -> int:
        """One layer of the pool in the wide dtype: what stock allocates, and the most that we may."""
        return self.slots * self.width * self.q_dtype.itemsize


@dataclass(frozen=True)
class Choice:
    """A strategy and why it, not the one asked for, where they differ."""

    strategy: str
    reason: str = ""


def parse(name: str | None) -> str:
    """A policy, a strategy or `off`; None and empty mean `exact`. Raises BadInput for anything else."""
    chosen = (name or "exact").strip().lower()
    if chosen not in CHOICES:
        raise BadInput(f"KVLAB_PATCH: {name!r} is not a strategy; use one of {', '.join(CHOICES)}")
    return chosen


def is_set(name: str, value: str | None) -> bool:
    """Is a variable that is yes or no set to yes? Raises BadInput for what is neither."""
    said = (value or "").strip().lower()
    if said not in (*_YES, *_NO):
        raise BadInput(f"{name}: {value!r} is neither yes nor no; use 1 or 0")
    return said in _YES


def misspelt(names: Iterable[str]) -> list[str]:
    """Of environment variables, a clause for each that is nearly one of ours: it says nothing to anybody."""
    ours = variables.SERVER | variables.OTHERS
    near = [n for n in names if n.upper().startswith("KV") and n not in ours]
    found = []
    for name in sorted(near):
        import difflib

        meant = difflib.get_close_matches(name.upper(), variables.SERVER, n=1, cutoff=0.8)
        if meant:
            found.append(f"{name} is no variable of kvlab's; is {meant[0]} meant?")
    return found


def choose(asked: str, facts: Facts, refusal: Callable[[str, Facts], str | None]) -> Choice:
    """The strategy for calls of `facts.kind`. `refusal(strategy, facts)`: why not that one, or None.

    Refusals are asked in order of preference until one has none; `stock` is never refused.
    """
    reasons = []
    for strategy in preferences(asked, facts):
        why = None if strategy == "stock" else refusal(strategy, facts)
        if why is None:
            return Choice(strategy, "; ".join(reasons))
        reasons.append(f"not {strategy}: {why}")
    raise AssertionError("stock ends every list of preferences")


def preferences(asked: str, facts: Facts) -> tuple[str, ...]:
    """Strategies in the order that `asked` would take them."""
    if asked in ("stock", "off"):
        return ("stock",)
    exact = ("stock",) if facts.slots <= SMALL_POOL_SLOTS else ("shadow", "gather", "stock")
    if asked == "exact":
        return exact
    if asked == "fast":
        return ("fused", *exact) if facts.kind == "decode" else exact
    if asked in ("fused", "native"):
        return (
            (asked, "shadow", "gather", "stock") if facts.kind == "decode" else ("shadow", "gather", "stock")
        )
    return (asked, *(s for s in ("shadow", "gather", "stock") if s != asked))
