"""When was each check lifted, moved or removed? All releases' rules, folded into spans of equal answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvlab.backends import rules
from kvlab.backends.rules import Evidence, Rules

if TYPE_CHECKING:
    import plotly.graph_objects as go


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive releases in which one check says the same. `evidence` is from the first of them.

    `mood`: `refuses`, `open`, `absent` (nothing there to check) or `casts`.
    """

    lane: str
    package: str
    state: str
    mood: str
    first: str
    last: str
    evidence: Evidence | None


State = tuple[str, str, Evidence | None]


def spans() -> list[Span]:
    """Every lane's spans, flashinfer's lanes first, oldest release first."""
    found = []
    for package, lanes in (("flashinfer-python", _FLASHINFER), ("sglang", _SGLANG)):
        for lane, of in lanes.items():
            found += _fold(lane, package, of)
    return found


def changes(lane: str) -> list[Span]:
    """The spans of one lane: the first release of the second one is where the check changed."""
    return [s for s in spans() if s.lane == lane]


def _fold(lane: str, package: str, of: Callable[[Rules], State]) -> list[Span]:
    found: list[Span] = []
    for release in rules.releases(package):
        state, mood, evidence = of(rules.load(package, release))
        if found and found[-1].state == state:
            found[-1] = msgspec.structs.replace(found[-1], last=release)
        else:
            span = Span(
                lane=lane,
                package=package,
                state=state,
                mood=mood,
                first=release,
                last=release,
                evidence=evidence,
            )
            found.append(span)
    return found


def _nope(r: Rules) -> State:
    rule = r["mla_shape"]
    allowed = rule["qk_nope_head_dim"]
    refuses = "192" in rule["says"]
    state = f"{' or '.join(map(str, allowed))} alone" if rule["says"] else "not looked at"
    return state, "refuses" if refuses else "open", r.evidence(rule)


def _block_num(r: Rules) -> State:
    rule = r["block_num"]
    return (
        ("multiple of 128 tokens, unless waived", "open", r.evidence(rule))
        if rule["optional"]
        else ("multiple of 128 tokens", "refuses", r.evidence(rule))
    )


def _xqa_dtypes(r: Rules) -> State:
    rule = r["xqa"]["dtypes"]
    pairs = (f"both {q}" if q == kv else f"{q} with {kv}" for q, kv in rule["value"])
    return " or ".join(pairs), "refuses", r.evidence(rule)


def _xqa_heads(r: Rules) -> State:
    rule = r["xqa"]["heads"]
    return (
        ("128, refused otherwise" if rule["checked"] else "built for 128, not checked"),
        "refuses",
        r.evidence(rule),
    )


def _ragged(r: Rules) -> State:
    rule = r["ragged_prefill"]
    glm5 = [256, 256] in rule["value"]
    return ("admits GLM-5" if glm5 else "refuses GLM-5"), "open" if glm5 else "refuses", r.evidence(rule)


def _native(r: Rules) -> State:
    rule = r["native_fp8"]
    if rule is None:
        return "no FP8 rows", "absent", None
    return " and ".join(rule["kernels"]) + ", SM90", "open", r.evidence(rule)


def _cutlass(r: Rules) -> State:
    if "cutlass_mla" not in r["registered"]:
        return "gone", "absent", None
    return "page size 128", "refuses", r.evidence(r["constraints"]["cutlass_mla"]["page"])


def _pool(r: Rules) -> State:
    return "64 alone", "refuses", r.evidence(r["dsa"]["pool_page"])


def _cast(backend: str) -> Callable[[Rules], State]:
    def of(r: Rules) -> State:
        cast = r["casts"][backend].get("decode")
        return ("casts the pool", "casts", r.evidence(cast, "code")) if cast else ("no cast", "open", None)

    return of


def _triton(r: Rules) -> State:
    rounds = r["rounds_q"]
    if "triton" in rounds:
        return "rounds query and probabilities to FP8", "casts", r.evidence(rounds["triton"], "code")
    return "rounds probabilities to FP8", "casts", r.evidence(rounds["triton_p"], "code")


def _glm5_sm120(r: Rules) -> State:
    if "GlmMoeDsaForCausalLM" not in r["models"]:
        return "no GLM-5", "absent", None
    dsa = r["dsa"]
    decode = dsa["defaults"]["GlmMoeDsaForCausalLM"]["fp8_e4m3"]["12"][1]
    works = decode == "flashinfer_sparse_mla"
    return decode, "open" if works else "refuses", r.evidence(dsa["default_backend"], "code")


def _present(backend: str) -> Callable[[Rules], State]:
    def of(r: Rules) -> State:
        if backend not in r["registered"]:
            return "not there", "absent", None
        return "there", "open", r.evidence(r["registered"][backend], "code")

    return of


_FLASHINFER: dict[str, Callable[[Rules], State]] = {
    "qk_nope_head_dim of MLA decode": _nope,
    "page-table width": _block_num,
    "XQA (SM120): query and rows": _xqa_dtypes,
    "XQA (SM120): query heads": _xqa_heads,
    "ragged MLA prefill": _ragged,
    "MLA wrapper's own FP8 rows": _native,
}
_SGLANG: dict[str, Callable[[Rules], State]] = {
    "cutlass_mla": _cutlass,
    "page size of a DSA model's pool": _pool,
    "flashinfer decode": _cast("flashinfer"),
    "fa3 decode": _cast("fa3"),
    "triton decode": _triton,
    "GLM-5's default on SM120": _glm5_sm120,
    "tokenspeed_mla": _present("tokenspeed_mla"),
    "cutedsl_mla": _present("cutedsl_mla"),
}
_COLOURS = {"refuses": "#D55E00", "open": "#009E73", "casts": "#CC79A7", "absent": "#B0B0B0"}
_MEANING = {"refuses": "refuses", "open": "admits", "casts": "serves at a cost", "absent": "not there"}
_BAR = 0.4


def figure(package: str = "flashinfer-python") -> go.Figure:
    """The lanes of one package over its releases: a bar a span under its lane's name, the check on hover.

    A bar runs from its first release to the one after its last. `layout.meta` has the spans as a table.
    """
    import plotly.graph_objects as go

    known = rules.releases(package)
    index = {r: i for i, r in enumerate(known)}
    fig = go.Figure()
    chosen = [s for s in spans() if s.package == package]
    for mood, colour in _COLOURS.items():
        rows = [s for s in chosen if s.mood == mood]
        if not rows:
            continue
        fig.add_bar(
            orientation="h",
            name=_MEANING[mood],
            marker={"color": colour, "line": {"width": 1, "color": "rgba(255,255,255,0.7)"}},
            width=_BAR,
            y=[s.lane for s in rows],
            x=[index[s.last] - index[s.first] + 1 for s in rows],
            base=[index[s.first] for s in rows],
            text=[s.state for s in rows],
            textposition="inside",
            insidetextanchor="start",
            textangle=0,
            textfont={"color": "#000"},
            customdata=[_hover(s) for s in rows],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
        )
    lanes = list(dict.fromkeys(s.lane for s in chosen))
    for i, lane in enumerate(lanes):
        # Above its bar: beside it, a name would take half of a phone.
        top = i - _BAR / 2
        fig.add_annotation(x=0, y=top, text=lane, showarrow=False, xanchor="left", yanchor="bottom")
    every = max(1, len(known) // 10)
    fig.update_layout(
        barmode="overlay",
        uniformtext={"minsize": 10, "mode": "hide"},
        meta={"columns": _COLUMNS, "rows": [_row(s) for s in chosen]},
    )
    fig.update_xaxes(
        tickmode="array",
        tickvals=[i + 0.5 for i in range(0, len(known), every)],
        ticktext=known[::every],
        range=[0, len(known)],
        tickangle=-45,
        title="release",
    )
    fig.update_yaxes(
        categoryorder="array",
        categoryarray=lanes,
        range=[len(lanes) - 0.5, -0.8],
        showticklabels=False,
        showgrid=False,
        title="",
    )
    return fig


_COLUMNS = ["check", "answer", "releases", "first of them"]


def _row(s: Span) -> list[str]:
    return [s.lane, s.state, _when(s), f"{s.evidence.file}:{s.evidence.line}" if s.evidence else "–"]


def _when(s: Span) -> str:
    return s.first if s.first == s.last else f"{s.first} to {s.last}"


def _hover(s: Span) -> list[Any]:
    proof = f"{s.evidence.file}:{s.evidence.line}<br>{s.evidence.quote[:90]}" if s.evidence else ""
    return [f"<b>{s.lane}</b><br>{s.state}, {_when(s)}", proof]
