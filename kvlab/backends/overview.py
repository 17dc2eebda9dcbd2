"""Who serves a model on a card, release by release? The backends' verdicts as one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvlab.backends import rules
from kvlab.backends.decision import Verdict, decide, question

if TYPE_CHECKING:
    import plotly.graph_objects as go

# A state's words, its mark and the colour that it has in the book.
_STATES = {
    "reads": ("reads FP8 rows", "circle", "#0072B2"),
    "casts": ("casts the whole pool", "square", "#D55E00"),
    "refused": ("refused", "x-thin-open", "#7F7F7F"),
    "open": ("not settled", "diamond-open", "#8C6BB1"),
}
_BACKENDS = (
    "flashinfer",
    "fa3",
    "triton",
    "flashmla",
    "trtllm_mla",
    "cutlass_mla",
    "tokenspeed_mla",
    "cutedsl_mla",
)
_SPARSE = "dsa, by default"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One backend in one release: `state` is `reads`, `casts`, `refused` or `open`."""

    backend: str
    release: str
    state: str
    reason: str


def marks(model: str, gpu: str, *, kv_dtype: str = "fp8_e4m3") -> list[Mark]:
    """A mark for each backend that a release has, oldest release first. Raises BadInput.

    A release without the backend or without the model has no mark. `dsa` (`nsa` before it was renamed) stands
    for the sub-backends that the release picks by itself.
    """
    found = []
    for release in rules.releases():
        q = question(model, gpu, release, kv_dtype=kv_dtype)
        known = rules.load("sglang", release)
        if q.geometry.architecture not in known["models"]:
            continue
        for v in decide(q):
            sparse = v.backend == known["dsa"]["name"]
            if sparse and not q.geometry.has_indexer:
                continue
            if sparse or (v.backend in _BACKENDS and v.backend in known["registered"]):
                name = _SPARSE if sparse else v.backend
                found.append(Mark(backend=name, release=release, state=_state(v), reason=v.reason))
    return found


def _state(v: Verdict) -> str:
    if v.works is None:
        return "open"
    return ("casts" if v.casts_pool else "reads") if v.works else "refused"


def figure(model: str, gpu: str) -> go.Figure:
    """Backends by releases, a mark a verdict, the reason on hover. Raises BadInput."""
    import plotly.graph_objects as go

    found = marks(model, gpu)
    fig = go.Figure()
    for state, (words, symbol, colour) in _STATES.items():
        rows = [m for m in found if m.state == state]
        if not rows:
            continue
        fig.add_scatter(
            name=words,
            x=[m.release for m in rows],
            y=[m.backend for m in rows],
            mode="markers",
            marker={"symbol": symbol, "color": colour, "size": 8, "line": {"width": 1.5, "color": colour}},
            customdata=[_wrapped(m.reason) for m in rows],
            hovertemplate="%{y}, SGLang %{x}<br>%{customdata}<extra></extra>",
        )
    shown = {m.backend for m in found}
    fig.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=[r for r in rules.releases() if any(m.release == r for m in found)],
        tickangle=-90,
        title="SGLang",
    )
    fig.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=[b for b in (_SPARSE, *reversed(_BACKENDS)) if b in shown],
        title="",
    )
    return fig


def _wrapped(text: str, width: int = 60) -> str:
    import textwrap

    return "<br>".join(textwrap.wrap(text, width))
