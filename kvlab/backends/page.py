"""The matrix as a table with filters: HTML that works offline, evidence one click away."""

from __future__ import annotations

import html
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from kvlab.backends.advice import Option
from kvlab.backends.matrix import Cell, Matrix, advice

_STATE = {True: "works", False: "no", None: "open"}
_SIGNS = {"works": "✓ works", "no": "✗ no", "open": "? not settled"}
_HEADS = ("Model", "Card", "SGLang", "Backend", "Answer", "Why (open for the evidence)")


def matrix_html(matrix: Matrix, *, model: str, gpu: str, sglang: str) -> str:
    """A `<div class="kvlab-matrix">` with selects for model, card, release, backend and answer.

    The first choice is a reader's starting point; without JavaScript its rows stand there as a plain table.
    Below the rows, the ways out without a patch for the chosen model, card and release. Raises ValueError
    where the matrix lacks the first choice.
    """
    if (model, gpu, sglang) not in {(c.model, c.gpu, c.sglang) for c in matrix.cells}:
        raise ValueError(f"the matrix has no cell for {model}, {gpu}, {sglang}")
    options, chosen = advice(matrix)
    written = [[o.what, " ".join(o.flags), *_costs(o)] for o in options]
    data = {
        "cells": [_packed(matrix, c) for c in matrix.cells],
        "models": matrix.models,
        "gpus": matrix.gpus,
        "releases": matrix.releases,
        "backends": matrix.backends,
        "reasons": matrix.reasons,
        "evidence": [e["text"] for e in matrix.evidence],
        "signs": _SIGNS,
        "options": written,
        "advice": [chosen[m, g, r] for m in matrix.models for g in matrix.gpus for r in matrix.releases],
        "start": [model, gpu, sglang],
    }
    # `</` would end the script element.
    payload = msgspec.json.encode(data).decode().replace("</", "<\\/")
    rows = "\n".join(
        _row(matrix, c) for c in matrix.cells if (c.model, c.gpu, c.sglang) == (model, gpu, sglang)
    )
    heads = "".join(f'<th scope="col">{h}</th>' for h in _HEADS)
    start = f"{model}, {gpu}, SGLang {sglang}"
    ways = "".join(_way(written[i]) for i in chosen[model, gpu, sglang])
    return f"""<div class="kvlab-matrix">
<style>
{_file("matrix.css")}</style>
<form class="kvlab-matrix-filters" aria-label="filters of the matrix" hidden>
{_select("Model", "models", matrix.models)}
{_select("Card", "gpus", matrix.gpus)}
{_select("SGLang", "releases", matrix.releases)}
{_select("Backend", "backends", matrix.backends)}
{_select("Answer", "answers", ["works", "works, no cast", "no", "open"])}
</form>
<p class="kvlab-matrix-count" role="status"></p>
<table><thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody></table>
<div class="kvlab-advice">
<p><strong>Without a patch</strong>: <span class="kvlab-advice-of">{html.escape(start)}</span></p>
<dl>{ways}</dl>
</div>
<script type="application/json" class="kvlab-matrix-data">{payload}</script>
<script>
{_file("matrix.js")}</script>
</div>"""


def _packed(matrix: Matrix, c: Cell) -> list[Any]:
    marks = (("d", c.default), ("c", c.casts_pool), ("q", c.works and c.rounds_q))
    return [
        matrix.models.index(c.model),
        matrix.gpus.index(c.gpu),
        matrix.releases.index(c.sglang),
        matrix.backends.index(c.backend),
        _STATE[c.works],
        "".join(k for k, on in marks if on),
        c.reason,
        c.evidence,
    ]


def _costs(o: Option) -> list[str]:
    return [f"accuracy: {o.accuracy}", f"memory: {o.memory}", f"time: {o.time}"]


def _way(written: list[str]) -> str:
    what, flags, *costs = map(html.escape, written)
    said = "".join(f'<dd class="kvlab-said">{c}</dd>' for c in costs)
    return f"<dt>{what}</dt><dd><code>{flags}</code></dd>{said}"


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
    answer = ", ".join([_SIGNS[_STATE[c.works]], *marks])
    proof = "".join(f"<li>{html.escape(matrix.evidence[i]['text'])}</li>" for i in c.evidence)
    why = html.escape(matrix.reasons[c.reason])
    if proof:
        why = f"<details><summary>{why}</summary><ul>{proof}</ul></details>"
    cells = "".join(f"<td>{html.escape(t)}</td>" for t in (c.model, c.gpu, c.sglang, c.backend, answer))
    return f"<tr>{cells}<td>{why}</td></tr>"


@cache
def _file(name: str) -> str:
    return resources.files("kvlab.backends").joinpath(name).read_text(encoding="utf-8")
