"""`kvlab bench attention`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvlab.bench.attention_results import AttentionRun


def register(bench: typer.Typer) -> None:
    bench.command("attention")(attention)


def attention(
    context: typer.Context,
    recorded: Annotated[bool, typer.Option("--recorded", help="Print the newest recorded run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    heads: Annotated[str, typer.Option(help="Query heads of a rank, e.g. 8,64.")] = "8,16,64,128",
    shapes: Annotated[str, typer.Option(help="BATCHxCONTEXT,… or unequal; all of the grid if empty.")] = "",
    only: Annotated[str, typer.Option(help="Rows to measure, e.g. fused,control_bf16.")] = "",
    pool: Annotated[int, typer.Option(help="Slots of a layer's pool.", min=128)] = 495_552,
    layers: Annotated[int, typer.Option(help="Layers, each with a pool of its own.", min=2)] = 8,
    seconds: Annotated[float, typer.Option(help="Stop between shapes after this long; 0: never.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write the run here as JSON, shape by shape.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the chart here.")] = None,
) -> None:
    """One layer's decode attention over FP8 rows: kvlab's kernels and every alternative, time and error."""
    import msgspec

    from kvlab import outputs

    # Before minutes are spent.
    outputs.check("--out", out)
    outputs.check("--html", html)
    if recorded:
        run = _recorded(context, heads, shapes, only, pool, layers)
        if out is not None:
            from kvlab.bench.attention_results import write

            write(out, run)
    else:
        run = _measure(heads, shapes, only, pool, layers, seconds, out, quiet=json)
    if html is not None:
        from kvlab.bench.attention_chart import page

        outputs.write("--html", html, page(run))
    if json:
        typer.echo(msgspec.json.encode(run).decode())
    else:
        _show(run)


def _recorded(
    context: typer.Context, heads: str, shapes: str, only: str, pool: int, layers: int
) -> "AttentionRun":
    """The newest recorded run, of it what was asked for."""
    from msgspec.structs import replace

    from kvlab.bench.attention_results import AttentionRun
    from kvlab.bench.recorded import given, newest, refuse_others, there

    refuse_others(context, "heads", "shapes", "only", "pool", "layers")
    run = newest("attention.json", AttentionRun)[1]
    asked, kept = given(context), run.shapes
    if "pool" in asked:
        there("--pool", [pool], [run.pool_slots])
    if "layers" in asked:
        there("--layers", [layers], [run.layers])
    if "heads" in asked:
        counts = there("--heads", _numbers("--heads", heads), (s.heads for s in kept))
        kept = [s for s in kept if s.heads in counts]
    if shapes:
        named = {id(s): "unequal" if s.lengths else f"{s.batch}x{s.context}" for s in kept}
        lists = _shapes(shapes, ([1, 2],))
        asked_for = ("unequal" if len(set(n)) > 1 else f"{len(n)}x{n[0]}" for n in lists)
        wanted = there("--shapes", asked_for, named.values())
        kept = [s for s in kept if named[id(s)] in wanted]
    if only:
        rows = there("--only", (r.strip() for r in only.split(",")), (r for s in kept for r in s.results))
        kept = [replace(s, results={n: r for n, r in s.results.items() if n in rows}) for s in kept]
        kept = [s for s in kept if s.results]
    return replace(run, shapes=kept)


def _measure(
    heads: str,
    shapes: str,
    only: str,
    pool: int,
    layers: int,
    seconds: float,
    out: Path | None,
    *,
    quiet: bool,
) -> "AttentionRun":
    from kvlab.bench.attention_results import ROWS
    from kvlab.errors import BadInput

    counts = _numbers("--heads", heads)
    try:
        from kvlab.bench import attention as bench
    except ModuleNotFoundError as e:
        raise BadInput(f"bench attention: needs {e.name}; install it, or use --recorded") from None
    lengths = [*bench.GRID, *bench.UNEQUAL] if not shapes else _shapes(shapes, bench.UNEQUAL)
    return bench.measure(
        lengths=lengths,
        heads=counts,
        rows=[r.strip() for r in only.split(",")] if only else list(ROWS),
        pool=pool,
        layers=layers,
        seconds=seconds or None,
        out=out,
        say=(lambda _: None) if quiet else (lambda line: typer.echo(line, err=True)),
    )


def _numbers(name: str, text: str) -> list[int]:
    from kvlab.errors import BadInput

    if not text or not all(t.strip().isdigit() and int(t) for t in text.split(",")):
        raise BadInput(f"{name}: expected numbers such as 8,16, got {text!r}")
    return [int(t) for t in text.split(",")]


def _shapes(text: str, unequal: tuple[list[int], ...]) -> list[list[int]]:
    from kvlab.errors import BadInput

    found: list[list[int]] = []
    for part in text.split(","):
        if part.strip() == "unequal":
            found += unequal
            continue
        batch, x, context = part.strip().partition("x")
        if not (x and batch.isdigit() and context.isdigit() and int(batch) and int(context)):
            raise BadInput(f"--shapes: expected BATCHxCONTEXT such as 64x4096, or unequal, got {part!r}")
        found.append([int(context)] * int(batch))
    return found


def _show(run: "AttentionRun") -> None:
    from rich.console import Console
    from rich.table import Table

    from kvlab.bench.attention_results import ON_REQUEST, ROWS

    wide = Console(width=170)
    wide.print(
        f"{run.gpu}, pools of {run.pool_slots:,} slots x {run.row_bytes} B {run.kv_dtype}, {run.slots}; "
        f"copy {run.copy_tb_s:.2f} TB/s; {run.provenance.date}"
    )
    if run.why_not_cuda:
        wide.print(f"fused is fused_triton here: {run.why_not_cuda}")
    for heads in dict.fromkeys(s.heads for s in run.shapes):
        table = Table(title=f"{heads} heads: us a layer, L2 flushed in brackets, relative error")
        names = [n for n in ROWS | ON_REQUEST if any(n in s.results for s in run.shapes)]
        table.add_column("batch x context")
        table.add_column("limit", justify="right")
        for name in names:
            table.add_column(name.replace("_", " "), justify="right")
        for s in (s for s in run.shapes if s.heads == heads):
            cells = []
            for name in names:
                r = s.results.get(name)
                if r is None:
                    cells.append("")
                elif r.us is None:
                    cells.append(r.note.partition(":")[0])
                else:
                    cells.append(f"{r.us:,.1f} ({r.cold_us:,.1f})\n{r.error:.1e}")
            table.add_row(s.name, f"{s.limit_us:,.1f}", *cells)
        wide.print(table)
        for row in ("fused", "fused_triton"):
            for over in ("accurate", "control_bf16"):
                ratio = run.geomean(heads, over, row=row) if row in names else None
                if ratio is not None:
                    what = "the best accurate alternative" if over == "accurate" else over
                    wide.print(f"  {row}: {ratio:.2f}x of {what}, geometric mean")
    for r in run.replays:
        wide.print(f"  one graph of fused replayed with {r.tokens:,} tokens: {r.us:.1f} us a layer")
    if run.ended_by:
        wide.print(f"  ended early by {run.ended_by}")
    notes = {n: r.note for s in run.shapes for n, r in s.results.items() if r.note}
    for name, note in notes.items():
        wide.print(f"  {name}: {note}")
