"""How do a page's figures look, in light and dark, on a phone and without JavaScript?"""

import os
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from kvlab.book.traced import Traced, plain_of
from kvlab.book.values import Value, describe
from kvlab.errors import BadInput

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's set without its yellow: told apart by the colour-blind, and on either ground.
PALETTE = {
    "stock": "#D55E00",
    "shadow": "#0072B2",
    "gather": "#009E73",
    "fused": "#CC79A7",
    "native": "#56B4E9",
    "control": "#7F7F7F",
    "limit": "#7F7F7F",
    "weights": "#8C6BB1",
}
HEIGHTS = {"short": 260, "medium": 380, "tall": 560}
_MARGIN = {"l": 8, "r": 8, "t": 36, "b": 8}
_ROWS_SHOWN = 60


def template() -> "go.layout.Template":
    """The book's plotly template: transparent ground, no fixed width; text and grid follow the theme."""
    import plotly.graph_objects as go

    axis = {
        "automargin": True,
        "zeroline": False,
        "gridcolor": "rgba(127,127,127,0.28)",
        "title": {"standoff": 10},
    }
    return go.layout.Template(
        layout={
            "colorway": ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#8C6BB1", "#7F7F7F"],
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {
                "family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif",
                "size": 13,
                "color": "#222",
            },
            "title": {"font": {"size": 15}, "x": 0, "xanchor": "left", "y": 0.98, "yanchor": "top"},
            "margin": _MARGIN,
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0},
            "hoverlabel": {"align": "left", "namelength": -1},
            "hovermode": "closest",
            "bargap": 0.3,
            "shapedefaults": {"line": {"color": "#7F7F7F", "width": 1.5, "dash": "dot"}},
            "colorscale": {"sequential": "Cividis"},
        },
        data={"heatmap": [{"colorscale": "Cividis"}]},
    )


def colour(strategy: str) -> str:
    """The colour that one strategy or part has in every figure of the book."""
    try:
        return PALETTE[strategy]
    except KeyError:
        raise BadInput(f"colour({strategy!r}): the book has colours for {', '.join(PALETTE)}") from None


def bare(values: Any, unit: str | None = None) -> Any:
    """The numbers of Values for a trace's x or y, in one unit. Refuses a number without origin."""
    if isinstance(values, Traced):
        values = list(values) if not isinstance(values.raw, dict) else list(values.raw)
    if isinstance(values, Value):
        return plain_of(values.to(unit) if unit else values)
    return [_one(v, unit) for v in values]


def _one(v: Any, unit: str | None) -> Any:
    if isinstance(v, Value):
        return plain_of(v.to(unit) if unit else v)
    if isinstance(v, str) or v is None:
        return v
    raise BadInput(f"a figure was given {v!r}, which has no origin")


def show(
    fig: "go.Figure",
    *,
    alt: str,
    height: Literal["short", "medium", "tall"] = "medium",
) -> None:
    """Display a plotly figure on the page.

    `alt` says in a sentence or two what the picture shows, for those who do not see it. Caption and name
    belong to the cell (`mystnb: figure:`). The data stand below the picture as a table that folds away.
    """
    from IPython.display import display

    if not alt.strip():
        raise BadInput("show(fig, alt=…): say what the figure shows, for those who do not see it")
    if height not in HEIGHTS:
        raise BadInput(f"show(fig, height={height!r}): one of {', '.join(HEIGHTS)}")
    fig.update_layout(template=template(), height=HEIGHTS[height], autosize=True)
    for axis in (*fig.select_xaxes(), *fig.select_yaxes()):
        if axis.type == "log" and axis.dtick is None:
            axis.dtick = 1
    if fig.layout.title.text:
        # The legend stands above the plot: leave the title its own line.
        fig.update_layout(margin_t=64)
    if not os.environ.get("KVLAB_BOOK"):
        fig.show()
        return
    display(
        {"text/html": to_html(fig, alt), "text/plain": alt},
        raw=True,
        metadata={"kvlab": {"figure": True, "alt": alt}},
    )


def to_html(fig: "go.Figure", alt: str) -> str:
    """The figure for an offline page: plotly.min.js and MathJax come from the book's own _static."""
    import plotly.io as pio

    plot = pio.to_html(
        fig,
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        config={"responsive": True, "displayModeBar": False, "displaylogo": False, "scrollZoom": False},
        # A fixed id keeps an unchanged page unchanged.
        div_id=f"kv-fig-{_digest(fig)}",
    )
    return (
        f'<div class="kv-figure"><div role="img" aria-label="{escape(alt, quote=True)}">{plot}</div>'
        f'<noscript><p class="kv-alt">{escape(alt)}</p></noscript>{data_table(fig)}</div>'
    )


def _digest(fig: "go.Figure") -> str:
    import hashlib

    return hashlib.sha256(fig.to_json().encode()).hexdigest()[:12]


def data_table(fig: "go.Figure") -> str:
    """What the figure plots, as an HTML table: for a reader without JavaScript, sight or patience.

    A figure whose marks are not its data (bars from release to release) states its own rows as
    `fig.layout.meta = {"columns": [...], "rows": [[...], ...]}`, text throughout.
    """
    own = fig.layout.meta
    if isinstance(own, dict) and "rows" in own:
        heads, rows = list(own["columns"]), [tuple(r) for r in own["rows"]]
    else:
        rows = []
        for trace in fig.data:
            x, y = _column(trace, "x", "labels"), _column(trace, "y", "values", "z")
            rows += [(trace.name or "", _cell(a), _cell(c)) for a, c in zip(x, y, strict=False)]
        heads = ["series", _axis(fig, "xaxis", "x"), _axis(fig, "yaxis", "y")]
        if not any(r[0] for r in rows):
            heads, rows = heads[1:], [r[1:] for r in rows]
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in r) + "</tr>" for r in rows[:_ROWS_SHOWN])
    more = f"<p>The first {_ROWS_SHOWN} of {len(rows)} points.</p>" if len(rows) > _ROWS_SHOWN else ""
    return (
        '<details class="kv-data"><summary>The data of this figure</summary>'
        '<div class="kv-scroll" tabindex="0" role="region" '
        f'aria-label="data of the figure"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{more}</details>"
    )


def _column(trace: Any, *names: str) -> Sequence[Any]:
    for name in names:
        column = getattr(trace, name, None) if name in trace else None
        if column is not None:
            return list(column)
    return []


def _axis(fig: "go.Figure", axis: str, fallback: str) -> str:
    title = fig.layout[axis].title.text
    return title.replace("<br>", " ") if title else fallback


def _cell(x: Any) -> str:
    if hasattr(x, "item"):
        x = x.item()
    if isinstance(x, float):
        return f"{x:,.4g}" if abs(x) < 1000 else f"{x:,.0f}"
    return f"{x:,}" if isinstance(x, int) and not isinstance(x, bool) else str(x).replace("<br>", " ")


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, formats: Sequence[str] | None = None
) -> None:
    """Display a table whose numbers are Values, each with its origin on hover.

    `formats` gives a format per column (`""` for the value's own). A bare number is refused. Caption and name
    belong to the cell (`mystnb: figure:`), as a figure's do.
    """
    from IPython.display import display

    specs = list(formats or [""] * len(columns))
    if len(specs) != len(columns) or any(len(r) != len(columns) for r in rows):
        raise BadInput(f"show_table: {len(columns)} columns, but formats or a row of another length")

    def cell(x: Any, spec: str, column: str) -> str:
        # On a phone cells of wide text tables stand below each other, each behind its column's name.
        label = f' data-label="{escape(column)}"'
        if isinstance(x, Value):
            kind = "kv-num" if not isinstance(x.value, str | bool) else "kv-text"
            title, shown = escape(describe(x)), escape(format(x, spec))
            return f'<td class="{kind}"{label}><span class="kv-n" title="{title}">{shown}</span></td>'
        if isinstance(x, str):
            return f"<td{label}>{escape(x)}</td>"
        if x is None:
            return f"<td{label}>–</td>"
        raise BadInput(f"show_table: {x!r} has no origin")

    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(map(cell, r, specs, columns)) + "</tr>" for r in rows)
    html = (
        '<div class="kv-scroll" tabindex="0" role="region" aria-label="table"><table class="table kv-table">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    plain = "\n".join(
        "\t".join(format(x, s) if isinstance(x, Value) else str(x) for x, s in zip(r, specs, strict=True))
        for r in rows
    )
    display({"text/html": html, "text/plain": plain}, raw=True, metadata={"kvlab": {"table": True}})
