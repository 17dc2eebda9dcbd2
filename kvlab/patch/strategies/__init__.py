"""What stands behind the seam, one module a strategy."""

from kvlab.patch.strategies.base import Call, Plain, Restart, Strategy, TakeOver, Unfit
from kvlab.patch.strategies.fused import Fused
from kvlab.patch.strategies.gather import Gather
from kvlab.patch.strategies.native import Native
from kvlab.patch.strategies.replan import Replan
from kvlab.patch.strategies.shadow import Shadow


def all_strategies() -> dict[str, Strategy]:
    """A fresh set, by name; `stock` has no code."""
    return {s.name: s for s in (Shadow(), Gather(), Replan(), Fused(), Native())}


__all__ = ["Call", "Plain", "Restart", "Strategy", "TakeOver", "Unfit", "all_strategies"]
