"""What did a decode step take in data/recorded/h200-stock? Its README's table is the only place that says."""

import re
from pathlib import Path

import msgspec

from kvlab.errors import BadInput

_COLUMNS = ["run", "context", "pool", "decode step (median)"]


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One row: `strategy` is stock or control_bf16 (a BF16 cache, so nothing is cast); `step_ms` a median."""

    strategy: str
    cuda_graphs: bool
    context: int
    pool: int
    step_ms: float


def read(path: Path) -> list[RecordedStep]:
    """The rows of the table headed `| run | context | pool | decode step (median) |`. Raises BadInput."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror or e}; expected the README of a recorded run") from None
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    if _COLUMNS not in rows:
        raise BadInput(f"{path}: no table with the columns {', '.join(_COLUMNS)}")
    found = []
    for row in rows[rows.index(_COLUMNS) + 2 :]:
        run, context, pool, step = row
        kind = re.match(r"(stock|control), (?:FP8|BF16) KV", run)
        ms = re.fullmatch(r"([\d.]+) ms", step)
        if kind is None or ms is None:
            raise BadInput(f"{path}: the row {' | '.join(row)} is no run that this table has")
        found.append(
            RecordedStep(
                strategy="control_bf16" if kind[1] == "control" else "stock",
                cuda_graphs="CUDA graphs off" not in run,
                context=int(context.replace(",", "")),
                pool=int(pool.replace(",", "")),
                step_ms=float(ms[1]),
            )
        )
    return found


def step(path: Path, strategy: str, *, context: int = 100, cuda_graphs: bool = True) -> float:
    """`step_ms` of the one row that matches. Raises BadInput."""
    rows = [
        r for r in read(path) if (r.strategy, r.context, r.cuda_graphs) == (strategy, context, cuda_graphs)
    ]
    if len(rows) != 1:
        raise BadInput(
            f"{path}: {len(rows)} rows for {strategy}, context {context}, CUDA graphs {cuda_graphs}"
        )
    return rows[0].step_ms


def logged_gb(path: Path, tokens: int) -> float:
    """What SGLang logged as the KV size of a pool of `tokens`, as the README quotes it. Raises BadInput."""
    try:
        text = path.read_text("utf-8")
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror or e}; expected the README of a recorded run") from None
    found = re.findall(rf"`#tokens: {tokens}, KV size: ([\d.]+) GB`", text)
    if len(found) != 1:
        raise BadInput(f"{path}: {len(found)} log lines for a pool of {tokens} tokens")
    return float(found[0])
