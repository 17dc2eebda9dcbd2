"""`kvlab bench trace`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvlab.bench.trace import TraceRun


def register(bench: typer.Typer) -> None:
    bench.command("trace")(trace)


def trace(
    context: typer.Context,
    recorded: Annotated[bool, typer.Option("--recorded", help="Print the newest recorded run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    size: Annotated[str, typer.Option(help="The trace to make, e.g. 420MB.")] = "420MB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each runs every reader once.")] = 3,
    hta: Annotated[
        str | None, typer.Option(help="A Python that has HolisticTraceAnalysis, to run beside.")
    ] = None,
) -> None:
    """Reading a large trace: time, memory and answer, beside json.load and HolisticTraceAnalysis."""
    import msgspec

    if recorded:
        from kvlab.bench.recorded import newest, refuse_others
        from kvlab.bench.trace import TraceRun

        refuse_others(context)
        run = newest("trace-reading.json", TraceRun)[1]
    else:
        from kvlab import data, units
        from kvlab.bench.trace import measure

        source = data.recorded("h200-stock") / "decode.trace.json.gz"
        bytes_ = units.parse_bytes(size, name="--size")
        run = measure(source, size=bytes_, rounds=rounds, hta=Path(hta) if hta else None)
    if json:
        typer.echo(msgspec.json.encode(run).decode())
    else:
        _show(run)


def _show(run: "TraceRun") -> None:
    from rich.console import Console
    from rich.table import Table

    out = Console(width=110)
    out.print(
        f"{run.file_bytes / 1e6:,.0f} MB, {run.events:,} events, {run.cpus} CPUs, "
        f"load {run.load:.1f}; {run.provenance.date}"
    )
    table = Table("reader", "seconds", "CPU", "peak MB", "answer")
    for name, r in run.readers.items():
        said = str(r.error or r.answer)[:300]
        table.add_row(name, f"{r.seconds:.2f}", f"{r.cpu_seconds:.2f}", f"{r.peak_bytes / 1e6:,.0f}", said)
    out.print(table)
    one = f" ({run.one_cpu_speedup:.1f} times, of one process)" if run.one_cpu_speedup else ""
    out.print(
        f"json.load takes {run.speedup:.1f} times as long as read, {run.cpu_speedup:.1f} times the CPU{one}; "
        f"read needs {run.memory_share:.0%} of the file's size in memory."
    )
