"""README's picture: recorded decode steps, drawn from data/recorded as an SVG that needs no script."""

from pathlib import Path
from xml.sax.saxutils import escape

from kvlab import data
from kvlab.errors import BadInput

FILE = Path("book/_static/step.svg")
_WIDTH, _LEFT, _RIGHT = 860, 12, 12
_LAYER = 10
# Text and rest follow the reader's theme; the cast keeps its colour.
_STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.cast { fill: #d55e00 } .rest { fill: #0072b2 } .attention { fill: #009e73 } .inside { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .inside { fill: #ffffff }
}
"""


def draw() -> str:
    """The SVG's text: stock's step, the patched one and the control's, to scale, and one layer of stock's."""
    import kvlab.trace as kt
    from kvlab.bench import recorded_steps
    from kvlab.bench.recorded import newest
    from kvlab.bench.step_results import StepRun
    from kvlab.trace import figures

    run = data.recorded("h200-stock")
    trace = kt.read(run / "decode.trace.json.gz")
    report = kt.report(trace)
    cast = report.kv_cast
    context = recorded_steps.read(run / "README.md")[0].context
    stock = recorded_steps.step(run / "README.md", "stock", context=context)
    control = recorded_steps.step(run / "README.md", "control_bf16", context=context)
    plain = {"pool": cast.pool_slots, "backend": "flashinfer", "page_size": 1, "cuda_graphs": True}
    found = newest("step.json", StepRun)[1].find("exact", 1, context, model="glm-5", **plain)
    if found is None or found.step_ms is None:
        raise BadInput(f"data/recorded: no step of exact at 1 x {context} in the newest step.json")
    patched = found.step_ms
    scale = (_WIDTH - _LEFT - _RIGHT) / stock
    end = _LEFT + cast.ms_per_step * scale
    out = [
        _text(
            _LEFT,
            22,
            f"One decode step on one H200: a rank of GLM-5's shape, {cast.pool_slots:,} slots, "
            f"one request of {context} tokens",
        ),
        _text(_LEFT, 54, f"FP8 cache, stock SGLang: {stock:.1f} ms", "small"),
        _bar(_LEFT, 62, cast.ms_per_step * scale, "cast"),
        _bar(end, 62, (stock - cast.ms_per_step) * scale, "rest"),
        _text(
            _LEFT + 10,
            83,
            f"{cast.copies_per_step:.0f} casts of the whole pool: {cast.ms_per_step:.1f} ms",
            "inside",
        ),
        _text(_LEFT, 118, f"FP8 cache, patched, in a later run: {patched:.1f} ms", "small"),
        _bar(_LEFT, 126, patched * scale, "rest"),
        _text(_LEFT, 182, f"BF16 cache, nothing to cast: {control:.1f} ms", "small"),
        _bar(_LEFT, 190, control * scale, "rest"),
    ]
    layer = figures.timeline(trace, layer=_LAYER)
    spans = [(b, x, t.name) for t in layer.data for b, x in zip(t.base, t.x, strict=True)]
    last = max(b + x for b, x, _ in spans)
    zoom = (_WIDTH - _LEFT - _RIGHT) / last
    out.append(_text(_LEFT, 254, f"One layer of the stock step, {last:,.0f} µs", "small"))
    for base, width, name in sorted(spans):
        kind = {"dtype cast": "cast", "attention": "attention"}.get(name, "rest")
        out.append(_bar(_LEFT + base * zoom, 262, width * zoom, kind))
    base, width = next((b, x) for b, x, name in spans if name == "dtype cast")
    attention = next(x for _, x, name in spans if name == "attention")
    out.append(
        _text(
            _LEFT + base * zoom + 10,
            283,
            f"the cast, {width:.0f} µs, for an attention kernel of {attention:.0f} µs (green)",
            "inside",
        )
    )
    alt = (
        f"The stock step takes {stock:.1f} ms, {cast.ms_per_step:.1f} ms of it casts; "
        f"patched it takes {patched:.1f} ms, with a BF16 cache {control:.1f} ms."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} 308" role="img" '
        f'aria-label="{escape(alt)}">'
        f"<style>{_STYLE}</style>\n" + "\n".join(out) + "\n</svg>\n"
    )


def write(root: Path) -> bool:
    """Draw it into the checkout; says whether the file changed."""
    path, drawn = root / FILE, draw()
    changed = not path.is_file() or path.read_text("utf-8") != drawn
    if changed:
        path.write_text(drawn, "utf-8")
    return changed


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.4):.2f}" height="32" class="{kind}"/>'
