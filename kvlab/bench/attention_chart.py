"""How do speed and error lie together? One recorded attention run as a plotly figure."""

from typing import TYPE_CHECKING

from kvlab.bench.attention_results import OURS, ROWS, AttentionRun

if TYPE_CHECKING:
    import plotly.graph_objects as go

# One colour a row, told apart in light and dark and by the colour-blind (Okabe and Ito's palette).
_COLOURS = {
    "stock": "#999999",
    "gather": "#E69F00",
    "shadow": "#F0E442",
    "fused": "#0072B2",
    "fused_triton": "#56B4E9",
    "control_bf16": "#000000",
    "native_fp8_fa3": "#D55E00",
    "native_fp8_fa2": "#CC79A7",
    "sglang_triton": "#009E73",
    "flashmla_fp8": "#8C6D31",
}


def figure(
    run: AttentionRun, heads: int = 8, *, cold: bool = False, skip: tuple[str, ...] = ()
) -> "go.Figure":
    """Microseconds a layer at each shape, the limit as a line; a bar's label is its error.

    `cold` takes the times with the L2 flushed. Rows without a time are left out; `skip` leaves out more.
    """
    import plotly.graph_objects as go

    shapes = [s for s in run.shapes if s.heads == heads]
    names = [s.name for s in shapes]
    fig = go.Figure()
    for row, what in ROWS.items():
        if row in skip:
            continue
        results = [s.results.get(row) for s in shapes]
        us = [None if r is None else (r.cold_us if cold else r.us) for r in results]
        if not any(us):
            continue
        errors = ["" if r is None or r.error is None else f"{100 * r.error:.2g} %" for r in results]
        fig.add_bar(
            x=names,
            y=us,
            name=row,
            marker={"color": _COLOURS[row], "line": {"width": 1 if row in OURS else 0, "color": "#888888"}},
            customdata=[[e, what] for e in errors],
            hovertemplate="%{x}<br>%{y:.1f} µs, error %{customdata[0]}<br>%{customdata[1]}",
        )
    fig.add_scatter(
        x=names,
        y=[s.limit_us for s in shapes],
        mode="lines+markers",
        name="limit: the active FP8 rows at copy speed",
        line={"dash": "dot", "color": "#888888"},
        hovertemplate="%{x}<br>limit %{y:.1f} µs",
    )
    fig.update_layout(
        barmode="group",
        xaxis_title="batch x context",
        yaxis={"title": "µs a layer", "type": "log"},
        legend={"orientation": "h", "y": -0.25},
        title=f"{heads} heads on {run.gpu}" + (", L2 flushed" if cold else ""),
    )
    return fig


def trade(run: AttentionRun, heads: int = 8) -> "go.Figure":
    """Error against time relative to the control, a point a row and shape: low and left is good."""
    import plotly.graph_objects as go

    fig = go.Figure()
    for row, what in ROWS.items():
        x, y, text = [], [], []
        for s in run.shapes:
            r, control = s.results.get(row), s.results.get("control_bf16")
            if s.heads == heads and r and control and r.us and control.us and r.error is not None:
                x.append(r.us / control.us)
                y.append(r.error)
                text.append(s.name)
        if x:
            fig.add_scatter(
                x=x,
                y=y,
                text=text,
                mode="markers",
                name=row,
                marker={"color": _COLOURS[row], "size": 9},
                hovertemplate="%{text}<br>%{x:.2f}x of the control, error %{y:.2e}<br>" + what,
            )
    fig.update_layout(
        xaxis={"title": "time over the BF16 control", "type": "log"},
        yaxis={"title": "relative error", "type": "log"},
        legend={"orientation": "h", "y": -0.25},
        title=f"Speed and error, {heads} heads on {run.gpu}",
    )
    return fig


def page(run: AttentionRun) -> str:
    """A page that needs no network: the charts of every head count."""
    import plotly.io as pio

    figures = [f(run, h) for h in dict.fromkeys(s.heads for s in run.shapes) for f in (figure, trade)]
    parts = [
        pio.to_html(f, full_html=False, include_plotlyjs=(i == 0), include_mathjax=False)
        for i, f in enumerate(figures)
    ]
    return f"<!doctype html><meta charset=utf-8><title>kvlab bench attention</title>{''.join(parts)}"
