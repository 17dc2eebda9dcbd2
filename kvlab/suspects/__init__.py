"""Is it GEMM, routing, communication? What a decode step should cost by parts, beside what was measured.

    found = kvlab.suspects.source_text()
    found.left_standing

`recorded_rank()` is the same analysis of the recorded H200 step; `live` holds the microbenchmarks (torch).
"""

from kvlab.suspects.analysis import SLACK, THRESHOLD, Analysis, Suspect, analyse
from kvlab.suspects.bounds import Bound, Case
from kvlab.suspects.cases import case, is_source_text, recorded_factors, recorded_rank, source_text

__all__ = [
    "SLACK",
    "THRESHOLD",
    "Analysis",
    "Bound",
    "Case",
    "Suspect",
    "analyse",
    "case",
    "is_source_text",
    "recorded_factors",
    "recorded_rank",
    "source_text",
]
