"""Which decode kernel serves a call: the rule against the times that it was made from."""

import json
import math

import pytest

from kvlab import data
from kvlab.kernels import choice

TIMES = choice.table()["times"]


def cells() -> dict[tuple[int, int], list[list[float]]]:
    """Contexts by (columns, batch), shortest first."""
    found: dict[tuple[int, int], list[list[float]]] = {}
    for t in TIMES:
        found.setdefault((t[0], t[1]), []).append(t)
    return {k: sorted(v, key=lambda t: t[2]) for k, v in found.items()}


def cost(name: str, contexts: list[list[float]]) -> float:
    return sum(math.log(t[3 + choice.NAMES.index(name)]) for t in contexts) / len(contexts)


@pytest.mark.parametrize(("columns", "batch"), list(cells()))
def test_the_choice_is_the_cheaper_one_over_the_contexts_that_the_table_has_room_for(columns, batch):
    contexts = cells()[columns, batch]
    for n in range(1, len(contexts) + 1):
        chosen = choice.prefer(columns, batch, int(contexts[n - 1][2]))
        other = next(name for name in choice.NAMES if name != chosen)
        assert cost(chosen, contexts[:n]) <= cost(other, contexts[:n])
    assert choice.prefer(columns, batch, 1) == choice.prefer(columns, batch, int(contexts[0][2]))


def test_it_costs_little_more_than_knowing_the_lengths():
    regret = []
    for (columns, batch), contexts in cells().items():
        chosen = 3 + choice.NAMES.index(choice.prefer(columns, batch, 2**31))
        regret += [math.log(t[chosen] / min(t[3:])) for t in contexts]
    assert math.exp(sum(regret) / len(regret)) < 1.05


def test_with_few_heads_the_chosen_one_is_never_the_slower_one():
    for columns, batch, context, *us in TIMES:
        chosen = choice.NAMES.index(choice.prefer(columns, batch, 2**31))
        assert columns > 16 or us[chosen] == min(us), (columns, batch, context)


@pytest.mark.parametrize(("columns", "batch"), [(1, 1), (7, 3), (24, 5), (1024, 4096), (16, 0)])
def test_what_was_not_measured_takes_the_nearest(columns, batch):
    assert choice.prefer(columns, batch, 4096) in choice.NAMES


def test_the_packaged_table_is_the_recorded_runs():
    packaged = choice.table()
    folder = data.recorded() / packaged["source"]["recorded"]
    names = ("heads-8-16", "heads-64-128", "heads-64-128-again", "heads-64-128-third")
    runs = [json.loads((folder / f"{n}.json").read_text()) for n in names]
    assert choice.from_runs(runs, folder.name) == packaged
    shapes = {(s["heads"], s["batch"], s["context"]) for run in runs for s in run["shapes"]}
    assert len(packaged["times"]) == len(shapes)
