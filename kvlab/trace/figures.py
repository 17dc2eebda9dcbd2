"""Pictures of a trace: a step by stream, by class and kernel, by layer; what a diff changed. Needs plotly."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab.errors import BadInput
from kvlab.trace.attribute import origins
from kvlab.trace.classes import ORDER, short
from kvlab.trace.diagnose import kinds
from kvlab.trace.diff import Diff
from kvlab.trace.layers import layers
from kvlab.trace.report import Report
from kvlab.trace.steps import Step, find
from kvlab.trace.store import Rank, Trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's palette, which colour-blind readers can tell apart; the cast gets its loudest colour.
COLOURS = dict(
    zip(
        ORDER,
        (
            "#d55e00",
            "#0072b2",
            "#009e73",
            "#cc79a7",
            "#56b4e9",
            "#f0e442",
            "#a6761d",
            "#8a8a8a",
            "#6a3d9a",
            "#b8b8b8",
        ),
        strict=True,
    )
)
_INK = "#7a7a7a"
# Less is not worth a bar in a waterfall.
_LEAST_MS = 0.001


def _plotly() -> Any:
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise BadInput("plotly is not installed; pip install 'kvlab[book]' or plotly") from None
    return go


def _pick(trace: Trace, rank: str | None, step: int) -> tuple[Rank, Step]:
    some = [r for r in trace.ranks if len(r.kernels) and rank in (None, r.key)]
    if not some:
        raise BadInput(f"{trace.path}: no GPU kernels{'' if rank is None else f' of rank {rank!r}'}")
    found = find(trace, some[0])
    steps = found.decode() or found.steps
    if not -len(steps) <= step < len(steps):
        raise BadInput(f"{trace.path}: no step {step}; there are {len(steps)}")
    return some[0], steps[step]


def _style(fig: Any, **layout: Any) -> Any:
    fig.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _INK, "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        margin={"l": 70, "r": 20, "t": 60, "b": 50},
        **layout,
    )
    grid = {"gridcolor": "rgba(128,128,128,.25)", "zerolinecolor": "rgba(128,128,128,.5)", "automargin": True}
    fig.update_xaxes(**grid)
    fig.update_yaxes(**grid)
    return fig


def timeline(
    trace: Trace, rank: str | None = None, step: int = 0, *, layer: int | None = None
) -> "go.Figure":
    """Every kernel of a step as a bar on its stream, coloured by class; of one layer where `layer` is given.

    x in milliseconds from the step's first kernel (microseconds from the layer's for one layer).
    """
    go = _plotly()
    one, at = _pick(trace, rank, step)
    kind = kinds(trace, one)
    k = one.kernels
    indices: Sequence[int] = range(at.lo, at.hi)
    zero, unit, scale = k.start[at.lo], "ms", 1e-3
    if layer is not None:
        found = layers(trace, one, at)
        if found is None or not 0 <= layer < len(found.first):
            raise BadInput(
                f"layer: no layer {layer} in this step; {len(found.first) if found else 0} are told apart"
            )
        indices = [i for i in indices if found.of(i) == layer]
        zero, unit, scale = k.start[indices[0]], "us", 1.0
    streams = sorted({k.track[i] for i in indices}, key=lambda t: trace.tracks[t][1:])
    fig = go.Figure()
    for cls in ORDER:
        mine = [i for i in indices if kind[k.name[i]].cls == cls]  # type: ignore[union-attr]
        if mine:
            fig.add_bar(
                orientation="h",
                name=cls,
                base=[(k.start[i] - zero) * scale for i in mine],
                x=[k.dur[i] * scale for i in mine],
                y=[f"stream {trace.stream(k.track[i])}" for i in mine],
                marker={"color": COLOURS[cls], "line": {"width": 0}},
                customdata=[[short(trace.names[k.name[i]]), k.dur[i]] for i in mine],
                hovertemplate="%{customdata[0]}<br>%{customdata[1]:.1f} us "
                f"at %{{base:.3f}} {unit}<extra>{cls}</extra>",
            )
    _style(fig, barmode="overlay", bargap=0.3, height=150 + 70 * len(streams))
    fig.update_yaxes(
        categoryorder="array", categoryarray=[f"stream {trace.stream(t)}" for t in reversed(streams)]
    )
    return fig.update_xaxes(
        title=f"{unit} from the start of the {'step' if layer is None else f'layer {layer}'}"
    )


def icicle(
    trace: Trace, rank: str | None = None, step: int = 0, *, by: str = "class", per_layer: bool = True
) -> "go.Figure":
    """A step's kernel time, in microseconds: by class, kernel and (where they can be told apart) layer; with
    by="module", by the modules that launched it: BadInput where the trace does not give them."""
    go = _plotly()
    one, at = _pick(trace, rank, step)
    k = one.kernels
    paths = _module_paths(trace, one, at) if by == "module" else _class_paths(trace, one, at, per_layer)
    values: dict[tuple[str, ...], float] = {}
    colours: dict[tuple[str, ...], str] = {("step",): "rgba(128,128,128,.3)"}
    kind = kinds(trace, one)
    for i, path in paths.items():
        colour = COLOURS[kind[k.name[i]].cls]  # type: ignore[union-attr]
        for depth in range(1, len(path) + 1):
            values[path[:depth]] = values.get(path[:depth], 0.0) + k.dur[i]
            if by == "class" or depth == len(path):
                colours.setdefault(path[:depth], colour)
    nodes = list(values)
    fig = go.Figure(
        go.Icicle(
            ids=["/".join(p) for p in nodes],
            labels=[p[-1].split(" #")[0] for p in nodes],
            parents=["/".join(p[:-1]) for p in nodes],
            values=[values[p] for p in nodes],
            branchvalues="total",
            maxdepth=3 if by == "class" else 6,
            tiling={"orientation": "v"},
            marker={"colors": [colours.get(p, "rgba(128,128,128,.3)") for p in nodes]},
            hovertemplate="%{label}<br>%{value:,.1f} us, %{percentRoot:.1%} of the step<extra></extra>",
        )
    )
    return _style(fig, height=420)


def _kernel_label(trace: Trace, name: int) -> str:
    # Template instances share a short name: the number keeps them apart, and is cut from what is shown.
    return f"{short(trace.names[name])} #{name}"


def _class_paths(trace: Trace, rank: Rank, step: Step, per_layer: bool) -> dict[int, tuple[str, ...]]:
    kind = kinds(trace, rank)
    found = layers(trace, rank, step) if per_layer else None
    paths = {}
    for i in range(step.lo, step.hi):
        name = rank.kernels.name[i]
        path: tuple[str, ...] = ("step", kind[name].cls, _kernel_label(trace, name))  # type: ignore[union-attr]
        if found and (layer := found.of(i)) is not None:
            path += (f"layer {layer}",)
        paths[i] = path
    return paths


def _module_paths(trace: Trace, rank: Rank, step: Step) -> dict[int, tuple[str, ...]]:
    found = origins(trace, rank, range(step.lo, step.hi))
    # Under graph replay a few kernels outside it have a module: that is no picture of the step.
    if 2 * sum(bool(o.modules) for o in found.values()) < step.hi - step.lo:
        raise BadInput(f"{trace.path}: no modules; record with Python frames and without CUDA graphs")
    paths = {}
    for i in range(step.lo, step.hi):
        modules = found[i].modules if i in found else ()
        paths[i] = ("step", *(modules or ("no module",)), _kernel_label(trace, rank.kernels.name[i]))
    return paths


def layer_strip(trace: Trace, rank: str | None = None, step: int = 0) -> "go.Figure":
    """Kernel time of each layer by class, in microseconds. Raises BadInput where layers cannot be told."""
    go = _plotly()
    one, at = _pick(trace, rank, step)
    found = layers(trace, one, at)
    if found is None:
        raise BadInput(f"{trace.path}: the layers of this step cannot be told apart")
    kind = kinds(trace, one)
    k = one.kernels
    time = {cls: [0.0] * len(found.first) for cls in ORDER}
    for i in range(at.lo, at.hi):
        if (layer := found.of(i)) is not None:
            time[kind[k.name[i]].cls][layer] += k.dur[i]  # type: ignore[union-attr]
    fig = go.Figure()
    for cls, us in time.items():
        if any(us):
            fig.add_bar(
                name=cls,
                x=list(range(len(us))),
                y=us,
                marker={"color": COLOURS[cls]},
                hovertemplate=f"layer %{{x}}: %{{y:.1f}} us<extra>{cls}</extra>",
            )
    _style(fig, barmode="stack", bargap=0.1, height=360)
    return fig.update_xaxes(title="layer").update_yaxes(title="us")


def classes(report: Report) -> "go.Figure":
    """Milliseconds per step by class, with the part in which nothing else runs."""
    go = _plotly()
    names = list(report.categories)[::-1]
    rows = [report.categories[n] for n in names]
    fig = go.Figure()
    fig.add_bar(
        orientation="h",
        y=names,
        x=[c.ms_per_step for c in rows],
        marker={"color": [COLOURS[n] for n in names]},
        customdata=[[c.share, c.exposed_ms, c.launches] for c in rows],
        hovertemplate="%{y}: %{x:.3f} ms, %{customdata[0]:.1%} of busy time<br>"
        "%{customdata[1]:.3f} ms exposed, %{customdata[2]:.0f} launches<extra></extra>",
    )
    return _style(fig, height=120 + 28 * len(names)).update_xaxes(title="ms per step")


def waterfall(change: Diff) -> "go.Figure":
    """From the step before to the step after, class by class, in milliseconds."""
    go = _plotly()
    rows = [(cls, c.delta_ms) for cls, c in change.categories.items()]
    rows.append(("idle", change.after_idle_ms - change.before_idle_ms))
    rows.append(("overlap of streams", change.before_overlap_ms - change.after_overlap_ms))
    rows = [(what, d) for what, d in rows if abs(d) >= _LEAST_MS]
    # What is left: the changes too small to draw, and a median step against mean classes.
    rest = change.delta_ms - sum(d for _, d in rows)
    if abs(rest) > 1e-6 * change.before_step_ms:
        rows.append(("rest", rest))
    fig = go.Figure(
        go.Waterfall(
            measure=["absolute", *["relative"] * len(rows), "total"],
            x=["before", *[cls for cls, _ in rows], "after"],
            y=[change.before_step_ms, *[d for _, d in rows], change.after_step_ms],
            text=[
                f"{change.before_step_ms:.2f}",
                *[f"{d:+.2f}" for _, d in rows],
                f"{change.after_step_ms:.2f}",
            ],
            decreasing={"marker": {"color": "#009e73"}},
            increasing={"marker": {"color": "#d55e00"}},
            totals={"marker": {"color": "#0072b2"}},
            connector={"line": {"color": _INK, "width": 1}},
            hovertemplate="%{x}: %{delta:+.3f} ms<extra></extra>",
        )
    )
    return _style(fig, height=420, showlegend=False).update_yaxes(title="ms per step")


def ranks(found: Sequence[Report]) -> "go.Figure":
    """Milliseconds per step by class, a bar a rank."""
    go = _plotly()
    fig = go.Figure()
    for cls in ORDER:
        ms = [r.categories[cls].ms_per_step if cls in r.categories else 0.0 for r in found]
        if any(ms):
            fig.add_bar(
                name=cls,
                x=[r.rank for r in found],
                y=ms,
                marker={"color": COLOURS[cls]},
                hovertemplate=f"%{{x}}: %{{y:.3f}} ms<extra>{cls}</extra>",
            )
    return _style(fig, barmode="stack", height=380).update_yaxes(title="ms per step")


__all__ = ["COLOURS", "classes", "icicle", "layer_strip", "ranks", "timeline", "waterfall"]
