"""Two things measured by turns: what their rounds say of one against the other."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.bench.paired import ratio
from kvlab.errors import BadInput

times = st.lists(st.floats(1, 100), min_size=1, max_size=30)


@given(times, st.floats(0.5, 2))
def test_what_changes_the_whole_round_drops_out(base, part):
    found = ratio([b * part for b in base], base, resamples=50)
    assert found.median == pytest.approx(part)
    assert (found.low, found.high) == pytest.approx((part, part))


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=20))
def test_the_interval_holds_the_median_and_repeats_itself(pairs):
    mine, base = zip(*pairs, strict=True)
    found = ratio(mine, base, resamples=100)
    assert min(a / b for a, b in pairs) <= found.low <= found.median <= found.high
    assert found.high <= max(a / b for a, b in pairs)
    assert found == ratio(mine, base, resamples=100)
    assert found.rounds == len(pairs)


def test_a_difference_smaller_than_the_drift_shows():
    """A host that slows down by half hides three parts in a hundred from medians, not from rounds."""
    noise = random.Random(1)
    base = [10 * (1 + i / 80) * noise.gauss(1, 0.01) for i in range(40)]
    mine = [10.3 * (1 + i / 80) * noise.gauss(1, 0.01) for i in range(40)]
    found = ratio(mine, base)
    assert 1.02 < found.low < 1.03 < found.high < 1.04


@given(st.integers(0, 5), st.integers(0, 5))
def test_rounds_come_in_pairs(some, others):
    if some == others and some:
        return
    with pytest.raises(BadInput, match=f"{some} rounds against {others}"):
        ratio([1.0] * some, [1.0] * others)
