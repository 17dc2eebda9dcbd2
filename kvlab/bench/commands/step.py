"""`kvlab bench step`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvlab.bench.step_results import StepRun


def register(bench: typer.Typer) -> None:
    bench.command("step")(step)


def step(
    context: typer.Context,
    recorded: Annotated[bool, typer.Option("--recorded", help="Print the newest recorded run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    model: Annotated[str, typer.Option(help="A preset, a config.json, or a rank's folder.")] = "glm-5",
    layers: Annotated[int | None, typer.Option(help="Layers of the rank; all if not given.", min=1)] = None,
    tp: Annotated[int, typer.Option(help="Ranks that the model is divided by; one is measured.", min=1)] = 8,
    strategies: Annotated[str, typer.Option(help="stock,shadow,…; all if empty.")] = "",
    batches: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens of each request.")] = "100,8192,65536",
    pools: Annotated[str, typer.Option(help="Slots of the FP8 pool.")] = "495552",
    backend: Annotated[str, typer.Option(help="flashinfer or fa3.")] = "flashinfer",
    page_size: Annotated[int, typer.Option(help="Tokens a page; flashinfer has 1.", min=1)] = 1,
    no_cuda_graphs: Annotated[bool, typer.Option("--no-cuda-graphs", help="Run every step eagerly.")] = False,
    steps: Annotated[int, typer.Option(help="Timed steps a point.", min=4)] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds for all processes together.", min=1)] = 900.0,
    trace: Annotated[
        str | None, typer.Option(help="Write a trace of two steps here; STRATEGY is replaced.")
    ] = None,
    merge: Annotated[
        str, typer.Option(help="Merge these runs (files, with commas, or a folder) instead of measuring.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write the run here as JSON, as it goes.")] = None,
) -> None:
    """A decode step of one rank in real SGLang: stock, patched, and with a BF16 cache."""
    import msgspec

    from kvlab import outputs
    from kvlab.bench import step_results

    # Before minutes are spent.
    outputs.check("--out", out)
    for strategy in strategies.split(",") if strategies else step_results.STRATEGIES:
        outputs.check("--trace", Path(trace.replace("STRATEGY", strategy.strip())) if trace else None)
    if recorded:
        run = _recorded(context)
    elif merge:
        run = step_results.merge(step_results.read(p) for p in _files(merge))
    else:
        from kvlab.bench import step as bench

        run = bench.measure(
            bench.Plan(
                model=model,
                layers=layers,
                tp=tp,
                strategies=tuple(s.strip() for s in strategies.split(","))
                if strategies
                else tuple(step_results.STRATEGIES),
                batches=bench.numbers("--batches", batches),
                contexts=bench.numbers("--contexts", contexts),
                pools=bench.numbers("--pools", pools),
                backend=backend,
                page_size=page_size,
                cuda_graphs=not no_cuda_graphs,
                steps=steps,
                timeout=timeout,
                trace=trace,
            ),
            out=out,
            say=(lambda _: None) if json else (lambda line: typer.echo(line, err=True)),
        )
    if out is not None:
        step_results.write(out, run)
    if json:
        typer.echo(msgspec.json.encode(run).decode())
    else:
        _show(run)


# Options that narrow a recorded run, and what each is of a step.
_NARROWS = {
    "model": "model",
    "layers": "layers",
    "tp": "tp",
    "strategies": "strategy",
    "batches": "batch",
    "contexts": "context",
    "pools": "pool",
    "backend": "backend",
    "page_size": "page_size",
    "no_cuda_graphs": "cuda_graphs",
}


def _recorded(context: typer.Context) -> "StepRun":
    """The newest recorded run, of it what was asked for. The control's pool is its own: --pools leaves it."""
    from msgspec.structs import replace

    from kvlab.bench.recorded import given, newest, refuse_others, spelt, there
    from kvlab.bench.step import numbers
    from kvlab.bench.step_results import StepRun, merge
    from kvlab.errors import BadInput

    refuse_others(context, *_NARROWS)
    run = newest("step.json", StepRun)[1]
    kept = run.runs
    for name in _NARROWS.keys() & given(context):
        option, field, value = spelt(name), _NARROWS[name], context.params[name]
        if name == "no_cuda_graphs":
            if all(r.cuda_graphs for r in run.runs):
                raise BadInput(f"{option}: not in the recorded run, which has steps with CUDA graphs only")
            values = ["False"]
        elif name in ("batches", "contexts", "pools"):
            values = list(map(str, numbers(option, value)))
        else:
            values = [v.strip() for v in str(value).split(",")]
        wanted = there(option, values, (str(getattr(r, field)) for r in run.runs))
        its_own = field == "pool"
        kept = [
            r for r in kept if str(getattr(r, field)) in wanted or (its_own and r.strategy == "control_bf16")
        ]
    if not kept:
        raise BadInput("--recorded: no step of the recorded run is all of that; ask for less at once")
    return merge([replace(run, runs=kept)])


def _files(text: str) -> list[Path]:
    from kvlab.errors import BadInput

    found: list[Path] = []
    for part in text.split(","):
        path = Path(part.strip())
        found += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not found:
        raise BadInput(f"--merge {text}: no JSON file there")
    return found


def _show(run: "StepRun") -> None:
    from rich.console import Console
    from rich.table import Table

    from kvlab.bench.step_results import STRATEGIES

    wide = Console(width=150)
    p = run.provenance
    wide.print(f"{', '.join(p.gpus) or 'no GPU'}, SGLang {p.versions.get('sglang', '?')}; {p.date}")
    servers = dict.fromkeys(
        (r.model, r.layers, r.heads, r.backend, r.page_size, r.cuda_graphs) for r in run.runs
    )
    for server in servers:
        mine = [
            r
            for r in run.runs
            if (r.model, r.layers, r.heads, r.backend, r.page_size, r.cuda_graphs) == server
        ]
        model, layers, heads, backend, page_size, graphs = server
        pages = f", pages of {page_size}" if page_size > 1 else ""
        table = Table(
            title=f"{model}, {layers} layers, {heads} heads, {backend}{pages}, CUDA graphs "
            f"{'on' if graphs else 'off'}: ms a step (quartiles)"
        )
        points = sorted({(r.context, r.batch) for r in mine})
        table.add_column("strategy")
        table.add_column("pool", justify="right")
        for context, batch in points:
            table.add_column(f"{batch} x {context:,}", justify="right")
        rows = dict.fromkeys((s, r.pool) for s in STRATEGIES for r in mine if r.strategy == s)
        for strategy, pool in rows:
            cells = []
            for context, batch in points:
                of = [
                    r
                    for r in mine
                    if (r.strategy, r.pool, r.batch, r.context) == (strategy, pool, batch, context)
                ]
                cells.append(_cell(of[0].step_ms, of[0].low_ms, of[0].high_ms) if of else "")
            table.add_row(strategy, f"{pool:,}", *cells)
        wide.print(table)
    for reason in dict.fromkeys(f"{r.batch} x {r.context:,}: {r.reason}" for r in run.runs if r.reason):
        wide.print(f"  {reason}")


def _cell(ms: float | None, low: float | None, high: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.2f}" if low is None or high is None else f"{ms:.2f} ({low:.2f}-{high:.2f})"
