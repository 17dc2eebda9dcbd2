"""The matrix: every backend for models x cards x releases, as data for a page with filters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvlab.backends import rules
from kvlab.backends.advice import Option, advise
from kvlab.backends.decision import Verdict, decide, question

# Six shapes that differ in what the checks look at: indexer, nope 192, heads, the architecture's name.
MODELS = ("glm-5", "deepseek-r1", "deepseek-v3.2", "kimi-k2", "glm-4.7-flash", "deepseek-v2-lite")
# One card of each compute capability that the checks tell apart, and the one of the recorded runs.
GPUS = ("rtx-pro-6000", "h200", "h100", "b200", "l40s", "a100")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict; `reason` and `evidence` are indices into the matrix's lists, where each stands once."""

    model: str
    gpu: str
    sglang: str
    backend: str
    works: bool | None
    default: bool
    casts_pool: bool
    rounds_q: bool | None
    attends: str
    page_size: int | None
    row_bytes: int | None
    reason: int
    evidence: list[int]


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """`cells` in the order models, gpus, releases, backends. `kv_dtype` and the default TP hold for all."""

    models: list[str]
    gpus: list[str]
    releases: list[str]
    backends: list[str]
    kv_dtype: str
    cells: list[Cell]
    reasons: list[str]
    evidence: list[dict[str, Any]]


def build(
    models: Sequence[str] = MODELS,
    gpus: Sequence[str] = GPUS,
    releases: Iterable[str] | None = None,
    *,
    kv_dtype: str = "fp8_e4m3",
    tp: int | None = None,
) -> Matrix:
    """The verdicts of every combination. Other hardware's backends are left out. Raises BadInput."""
    wanted = list(releases) if releases is not None else rules.releases()
    reasons, proofs, names = _Intern(), _Intern(), _Intern()
    cells = []
    for model in models:
        for gpu in gpus:
            for release in wanted:
                for v in decide(question(model, gpu, release, kv_dtype=kv_dtype, tp=tp)):
                    if v.reason.startswith("serves "):
                        continue
                    names(v.backend)
                    cells.append(_cell(v, model, gpu, release, reasons, proofs))
    return Matrix(
        models=list(models),
        gpus=list(gpus),
        releases=wanted,
        backends=sorted(names.values, key=_order),
        kv_dtype=kv_dtype,
        cells=cells,
        reasons=reasons.values,
        evidence=[{**msgspec.to_builtins(e), "text": str(e)} for e in proofs.values],
    )


def advice(matrix: Matrix) -> tuple[list[Option], dict[tuple[str, str, str], list[int]]]:
    """The ways out without a patch: each option once, and for each model, card and release its indices."""
    known = _Intern()
    chosen = {}
    for at in dict.fromkeys((c.model, c.gpu, c.sglang) for c in matrix.cells):
        options = advise(question(*at, kv_dtype=matrix.kv_dtype))
        chosen[at] = [known(msgspec.json.encode(o)) for o in options]
    return [msgspec.json.decode(o, type=Option) for o in known.values], chosen


def _cell(v: Verdict, model: str, gpu: str, release: str, reasons: _Intern, proofs: _Intern) -> Cell:
    return Cell(
        model=model,
        gpu=gpu,
        sglang=release,
        backend=v.backend,
        works=v.works,
        default=v.default,
        casts_pool=v.casts_pool and bool(v.works),
        rounds_q=v.rounds_q,
        attends=v.attends,
        page_size=v.page_size,
        row_bytes=v.row_bytes,
        reason=reasons(v.reason),
        evidence=[proofs(e) for e in v.evidence],
    )


def _order(name: str) -> tuple[bool, str]:
    return ("." in name, name)


class _Intern:
    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        if value not in self._index:
            self._index[value] = len(self.values)
            self.values.append(value)
        return self._index[value]
