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
    pairs = ", ".join(f"{q} query with {kv} rows" for q, kv in rule["value"])
    return pairs, "refuses", r.evidence(rule)


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
    "XQA (SM120): dtypes": _xqa_dtypes,
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


def figure(package: str = "flashinfer-python") -> go.Figure:
    """The lanes of one package over its releases: a bar a span, with the check on hover."""
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
            y=[s.lane for s in rows],
            x=[index[s.last] - index[s.first] + 1 for s in rows],
            base=[index[s.first] for s in rows],
            text=[s.state for s in rows],
            textposition="inside",
            insidetextanchor="start",
            customdata=[_hover(s) for s in rows],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
        )
    fig.update_layout(barmode="overlay", title="flashinfer" if package.startswith("flash") else "SGLang")
    every = max(1, len(known) // 14)
    fig.update_xaxes(
        tickmode="array",
        tickvals=[i + 0.5 for i in range(0, len(known), every)],
        ticktext=known[::every],
        range=[0, len(known)],
        tickangle=-45,
        title="release",
    )
    fig.update_yaxes(autorange="reversed", title="")
    return fig


def _hover(s: Span) -> list[Any]:
    when = s.first if s.first == s.last else f"{s.first} to {s.last}"
    proof = f"{s.evidence.file}:{s.evidence.line} {s.evidence.quote}" if s.evidence else ""
    return [f"<b>{s.lane}</b>: {s.state}, {when}", proof[:160]]
