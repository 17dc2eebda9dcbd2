"""Where does the time go? Reads a torch-profiler trace, explains a decode step, finds the full-pool KV cast.

    trace = kvlab.trace.read("decode.trace.json.gz")
    report = kvlab.trace.report(trace)
    report.kv_cast.ms_per_step

Figures are in `kvlab.trace.figures` (needs plotly), the self-contained page in `kvlab.trace.page`.
"""

from kvlab.trace.diagnose import KvCast
from kvlab.trace.findings import Finding
from kvlab.trace.report import Category, Kernel, Report, report, reports, slowest, spread
from kvlab.trace.store import Rank, Trace, build, read

__all__ = [
    "Category",
    "Finding",
    "Kernel",
    "KvCast",
    "Rank",
    "Report",
    "Trace",
    "build",
    "read",
    "report",
    "reports",
    "slowest",
    "spread",
]
