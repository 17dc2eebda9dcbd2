"""One self-contained page: a trace's or a diff's pictures and findings, readable with the network off."""

import contextlib
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlab import outputs
from kvlab.errors import BadInput
from kvlab.trace import figures
from kvlab.trace.diff import Diff
from kvlab.trace.report import Report, slowest, spread
from kvlab.trace.store import Trace

_CSS = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --soft: #666; --line: #ccc; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #16181c; --soft: #999; --line: #444; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.small { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; }
td, th { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; }
figure { margin: 1rem 0; } .do { border-left: 3px solid #0072b2; padding-left: .8rem; }
"""


def write(path: str | Path, title: str, parts: Sequence[tuple[str, Any]]) -> None:
    """Write the page; `parts` are (heading, plotly figure or HTML text). A failure leaves nothing behind.

    Raises BadInput where plotly is not installed or the file cannot be written.
    """
    try:
        from plotly.io import to_html
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise BadInput("--html: needs plotly; pip install 'kvlab[book]' or plotly") from None
    body = [f"<h1>{html.escape(title)}</h1>"]
    for number, (heading, part) in enumerate(parts):
        if heading:
            body.append(f"<h2>{html.escape(heading)}</h2>")
        if isinstance(part, str):
            body.append(part)
        else:
            drawn = to_html(part, full_html=False, include_plotlyjs=False, div_id=f"figure-{number}")
            body.append(f"<figure>{drawn}</figure>")
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_CSS}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(body)}</body></html>"
    )
    outputs.write("--html", Path(path), text)


def write_report(path: str | Path, found: Sequence[tuple[Trace, Report]]) -> None:
    """The page of `trace report`: findings, the slowest rank's pictures, and the ranks beside each other."""
    reports = [r for _, r in found]
    one = slowest(reports)
    trace = next(t for t, r in found if r is one)
    parts: list[tuple[str, Any]] = [("", _summary(one)), ("What it shows", _findings(one))]
    if len(reports) > 1:
        far = spread(reports)
        parts.append(
            (f"{len(reports)} ranks" + (f", the slowest {far:.1%} over the fastest" if far else ""), "")
        )
        parts.append(("", figures.ranks(reports)))
    if one.steps:
        parts.append(("Time by class", figures.classes(one)))
        parts.append(("A step, stream by stream", figures.timeline(trace, one.rank)))
        if one.layers and (middle := _middle(trace, one)) is not None:
            parts.append((f"Layer {middle} of that step", figures.timeline(trace, one.rank, layer=middle)))
            parts.append(("Layer by layer", figures.layer_strip(trace, one.rank)))
        parts.append(("By class, kernel and layer", figures.icicle(trace, one.rank)))
        with contextlib.suppress(BadInput):  # only a trace without CUDA graphs gives modules
            parts.append(("By module", figures.icicle(trace, one.rank, by="module")))
    parts.append(("All kernels", _kernels(one)))
    write(path, f"{Path(one.file).name}: {one.rank}", parts)


def write_diff(path: str | Path, change: Diff) -> None:
    """The page of `trace diff`."""
    text = (
        f"<p>{html.escape(Path(change.before).name)} against {html.escape(Path(change.after).name)}: "
        f"a step takes {change.after_step_ms:.2f} ms, before {change.before_step_ms:.2f} ms, "
        f"{change.speedup:.2f} times as fast.</p>"
    )
    parts = [("", text), ("By class", figures.waterfall(change)), ("By kernel", _changes(change))]
    if change.ranks:
        parts.insert(2, ("By rank", _rank_changes(change)))
    write(path, "before and after", parts)


def _middle(trace: Trace, one: Report) -> int | None:
    from kvlab.trace.layers import layers
    from kvlab.trace.steps import find

    rank = next(r for r in trace.ranks if r.key == one.rank)
    found = layers(trace, rank, find(trace, rank).decode()[0])
    return len(found.first) // 2 if found else None


def _summary(r: Report) -> str:
    if not r.steps:
        return f"<p>{html.escape(r.device or 'GPU not named')}; no decode step.</p>"
    graphs = "CUDA graphs" if r.cuda_graphs else "no CUDA graphs"
    predicted = (
        f" Without the full-pool casts at least {r.predicted_step_ms:.2f} ms: "
        f"{html.escape(r.predicted_from or '')}."
        if r.predicted_step_ms
        else ""
    )
    return (
        f"<p>{html.escape(r.device or 'GPU not named')}, {html.escape(r.backend or 'backend not known')}, "
        f"{graphs}: {r.steps} decode step{'s' if r.steps > 1 else ''} of {r.step_ms:.2f} ms, "
        f"GPU busy {r.busy_ms:.2f} ms.{predicted}</p>"
        + "".join(f'<p class="small">note: {html.escape(n)}</p>' for n in r.notes)
    )


def _findings(r: Report) -> str:
    rows = []
    for f in r.diagnosis:
        rows.append(f"<p><b>{html.escape(f.what)}: {f.verdict}.</b> {_code(f.text)}</p>")
        if f.do:
            rows.append(f'<p class="do">{_code(f.do)}</p>')
    return "".join(rows)


def _code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _kernels(r: Report) -> str:
    rows = "".join(
        f'<tr><td title="{html.escape(k.name)}">{html.escape(k.short)}</td><td>{k.category}</td>'
        f"<td>{k.ms_per_step:.4f}</td><td>{k.launches:.0f}</td></tr>"
        for k in r.kernels
    )
    return f"<table><tr><th>kernel</th><th>class</th><th>ms/step</th><th>launches</th></tr>{rows}</table>"


def _changes(d: Diff) -> str:
    def status(before: float, after: float) -> str:
        return "appeared" if not before else "vanished" if not after else ""

    rows = "".join(
        f'<tr><td title="{html.escape(k.name)}">{html.escape(k.short)}</td><td>{k.category}</td>'
        f"<td>{k.before_ms:.4f}</td><td>{k.after_ms:.4f}</td><td>{k.delta_ms:+.4f}</td>"
        f"<td>{status(k.before_launches, k.after_launches)}</td></tr>"
        for k in d.kernels
    )
    head = "<tr><th>kernel</th><th>class</th><th>before ms</th><th>after ms</th><th>change</th><th></th></tr>"
    return f"<table>{head}{rows}</table>"


def _rank_changes(d: Diff) -> str:
    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows = "".join(
        f"<tr><td>{html.escape(r.rank)}</td><td>{ms(r.before_ms)}</td><td>{ms(r.after_ms)}</td>"
        f"<td>{ms(r.before_cast_ms)}</td><td>{ms(r.after_cast_ms)}</td></tr>"
        for r in d.ranks
    )
    head = "<tr><th>rank</th><th>step ms before</th><th>after</th><th>cast ms before</th><th>after</th></tr>"
    spreads = [
        f"{s:.1%} {word}"
        for s, word in ((d.before_spread, "before"), (d.after_spread, "after"))
        if s is not None
    ]
    said = f"<p>Slowest rank over fastest: {', '.join(spreads)}.</p>" if spreads else ""
    return f"{said}<table>{head}{rows}</table>"
