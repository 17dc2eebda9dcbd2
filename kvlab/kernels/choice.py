"""Which of the two decode kernels serves a call? By what both cost on a card, looked up before capture.

`choice.json` holds the measured times, taken from recorded runs by `from_runs`. A captured graph keeps its
kernel whatever lengths it is replayed with, so the choice asks for shapes alone: query columns, requests, and
the longest context that the table has room for. It is the same after a restart and on every TP rank.
"""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

FILE = "choice.json"
NAMES = ("cuda", "triton")


@lru_cache
def table() -> dict[str, Any]:
    """{"source": …, "times": [[columns, batch, context, us of cuda, us of triton], …]}."""
    return json.loads(resources.files(__package__).joinpath(FILE).read_text())


@lru_cache(maxsize=4096)
def prefer(columns: int, batch: int, longest: int) -> str:
    """ "cuda" or "triton": which took less time, in the geometric mean over contexts up to `longest`.

    `columns`: query heads times query tokens of a request. Taken from the nearest columns and batch that were
    measured, by ratio; contexts weigh alike, since a graph's later lengths are not known.
    """
    times = table()["times"]
    for axis, asked in enumerate((columns, batch)):
        nearest = min({t[axis] for t in times}, key=lambda have, n=asked: abs(math.log(have / max(n, 1))))
        times = [t for t in times if t[axis] == nearest]
    shortest = min(t[2] for t in times)
    logs = [math.log(t[3] / t[4]) for t in times if t[2] <= max(longest, shortest)]
    return NAMES[sum(logs) > 0]


def from_runs(runs: Sequence[dict[str, Any]], source: str) -> dict[str, Any]:
    """The table of runs of `kvlab bench attention --only fused_cuda,fused_triton`: warm microseconds.

    Where two runs have a shape, the later one's times stand.
    """
    times = {}
    for s in (s for run in runs for s in run["shapes"]):
        both = [s["results"].get(f"fused_{name}", {}).get("us") for name in NAMES]
        if s.get("lengths") is None and None not in both:
            times[s["heads"], s["batch"], s["context"]] = [round(us, 2) for us in both]
    known = runs[-1]["provenance"]
    origin = {"recorded": source, "gpu": runs[-1]["gpu"], "date": known["date"], "commit": known["commit"]}
    return {"source": origin, "times": [[*shape, *both] for shape, both in sorted(times.items())]}
