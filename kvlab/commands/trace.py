"""`kvlab trace`: read, explain and compare torch-profiler traces of SGLang."""

from pathlib import Path
from typing import Any

import typer

FILES = typer.Argument(
    ..., metavar="FILE...", help="torch-profiler traces, .json or .json.gz; several are ranks."
)
JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else.")
HTML = typer.Option(None, "--html", metavar="FILE", help="Write one self-contained page with the pictures.")
SGLANG = typer.Option(
    None, "--sglang", metavar="RELEASE", help="The SGLang release, for the advice, e.g. 0.5.9."
)
BANDWIDTH = typer.Option(
    None,
    "--bandwidth",
    metavar="TB/S",
    help="What the cast moves on this GPU, in TB/s: sizes the pool where the trace has no launch grid.",
)


def register(app: typer.Typer) -> None:
    """Add `trace` with its subcommands."""
    trace = typer.Typer(help="Where does a decode step's time go?", no_args_is_help=True)
    app.add_typer(trace, name="trace")

    @trace.command()
    def report(
        files: list[Path] = FILES,
        html: Path | None = HTML,
        as_json: bool = JSON,
        sglang: str | None = SGLANG,
        bandwidth: float | None = BANDWIDTH,
    ) -> None:
        """Explain a trace: classes, the full-pool KV cast, its cousins, and the step without it."""
        from kvlab.trace import console
        from kvlab.trace.report import reports

        traces = [_read(f) for f in files]
        found = [(t, r) for t in traces for r in reports(t, bandwidth=_speed(bandwidth), sglang=sglang)]
        _emit(console.report_json([r for _, r in found]) if as_json else None)
        if not as_json:
            console.print_reports([r for _, r in found])


def _read(path: Path) -> Any:
    from kvlab.trace.store import read

    return read(path)


def _speed(tbs: float | None) -> float | None:
    from kvlab.errors import BadInput

    if tbs is None:
        return None
    if not 0 < tbs < 100:
        raise BadInput(f"--bandwidth: {tbs} is not a rate in TB/s; an H200's cast moves about 1.03")
    return tbs * 1e12


def _emit(text: str | None) -> None:
    if text is not None:
        typer.echo(text)
