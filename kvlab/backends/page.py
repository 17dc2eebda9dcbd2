"""The matrix as a table with filters: HTML that works offline, evidence one click away."""

from __future__ import annotations

import html
from functools import cache
from importlib import resources

import msgspec

from kvlab.backends.matrix import Cell, Matrix

_STATE = {True: "works", False: "no", None: "open"}


def matrix_html(matrix: Matrix, *, model: str, gpu: str, sglang: str) -> str:
    """A `<div class="kvlab-matrix">` with selects for model, card, release, backend and answer.

    The first choice is a reader's starting point; without JavaScript its rows stand there as a plain table.
    Raises ValueError where the matrix lacks it.
    """
    if (model, gpu, sglang) not in {(c.model, c.gpu, c.sglang) for c in matrix.cells}:
        raise ValueError(f"the matrix has no cell for {model}, {gpu}, {sglang}")
    data = {
        "cells": [
            [
                matrix.models.index(c.model),
                matrix.gpus.index(c.gpu),
                matrix.releases.index(c.sglang),
                matrix.backends.index(c.backend),
                _STATE[c.works],
                "".join(
                    k
                    for k, on in (("d", c.default), ("c", c.casts_pool), ("q", c.works and c.rounds_q))
                    if on
                ),
                c.reason,
                c.evidence,
            ]
            for c in matrix.cells
        ],
        "models": matrix.models,
        "gpus": matrix.gpus,
        "releases": matrix.releases,
        "backends": matrix.backends,
        "reasons": matrix.reasons,
        "evidence": [e["text"] for e in matrix.evidence],
        "start": [model, gpu, sglang],
    }
    # `</` would end the script element.
    payload = msgspec.json.encode(data).decode().replace("</", "<\\/")
    rows = "\n".join(
        _row(matrix, c) for c in matrix.cells if (c.model, c.gpu, c.sglang) == (model, gpu, sglang)
    )
    heads = "".join(f"<th>{h}</th>" for h in ("Model", "Card", "SGLang", "Backend", "Answer", "Why"))
    return f"""<div class="kvlab-matrix">
<form class="kvlab-matrix-filters" hidden>
{_select("Model", "models", matrix.models)}
{_select("Card", "gpus", matrix.gpus)}
{_select("SGLang", "releases", matrix.releases)}
{_select("Backend", "backends", matrix.backends)}
{_select("Answer", "answers", ["works", "works, no cast", "no", "open"])}
</form>
<p class="kvlab-matrix-count" aria-live="polite"></p>
<table><thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody></table>
<script type="application/json" class="kvlab-matrix-data">{payload}</script>
<script>
{_script()}</script>
</div>"""


def _select(label: str, name: str, values: list[str]) -> str:
    options = "".join(f"<option>{html.escape(v)}</option>" for v in values)
    return f'<label>{label} <select name="{name}"><option value="">all</option>{options}</select></label>'


def _row(matrix: Matrix, c: Cell) -> str:
    marks = [
        t
        for t, on in (
            ("default", c.default),
            ("casts the pool", c.casts_pool),
            ("rounds Q to FP8", c.works and c.rounds_q),
        )
        if on
    ]
    answer = ", ".join([_STATE[c.works], *marks])
    proof = "".join(f"<li>{html.escape(matrix.evidence[i]['text'])}</li>" for i in c.evidence)
    why = html.escape(matrix.reasons[c.reason])
    if proof:
        why = f"<details><summary>{why}</summary><ul>{proof}</ul></details>"
    cells = "".join(f"<td>{html.escape(t)}</td>" for t in (c.model, c.gpu, c.sglang, c.backend, answer))
    return f"<tr>{cells}<td>{why}</td></tr>"


@cache
def _script() -> str:
    return resources.files("kvlab.backends").joinpath("matrix.js").read_text(encoding="utf-8")
