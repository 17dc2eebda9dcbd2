"""Two things measured by turns: what part of the other's time does one take, and how sure is that?"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.errors import BadInput

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' ratios, with a bootstrap interval of that median (CONFIDENCE)."""

    median: float
    low: float
    high: float
    rounds: int


def ratio(mine: Sequence[float], base: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> Ratio:
    """`mine` over `base`, round by round: what both share in a round, a busy host, drops out.

    Times of any one unit, a value a round. The interval is Efron's percentile interval: rounds drawn anew
    with replacement, `resamples` times, the same for the same `seed`. Raises BadInput for unequal or no
    rounds.
    """
    if len(mine) != len(base) or not mine:
        raise BadInput(f"{len(mine)} rounds against {len(base)}: expected as many of both, one at least")
    each = [a / b for a, b in zip(mine, base, strict=True)]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(each, k=len(each))) for _ in range(resamples))
    cut = round(resamples * (1 - CONFIDENCE) / 2)
    return Ratio(statistics.median(each), medians[cut], medians[-1 - cut], len(each))
