"""`kvlab trace`: read, explain, compare and record torch-profiler traces of SGLang."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from kvlab.trace import Report, Trace

FILES = typer.Argument(..., metavar="FILE...", help="Traces, .json or .json.gz; several are ranks.")
BEFORE = typer.Argument(..., help="The trace before, .json or .json.gz; or a folder with one for each rank.")
AFTER = typer.Argument(..., help="The trace after, likewise.")
OUT = typer.Option(..., "--out", metavar="FOLDER", help="A new folder, e.g. data/recorded/NAME.")
FOLDER = typer.Option(None, "--folder", help="A folder that the server can write and this process read.")
JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else.")
HTML = typer.Option(None, "--html", metavar="FILE", help="Write one self-contained page with the pictures.")
SGLANG = typer.Option(
    None, "--sglang", metavar="RELEASE", help="The SGLang release, e.g. 0.5.9: for the advice."
)
BANDWIDTH = typer.Option(
    None,
    "--bandwidth",
    metavar="TB/S",
    help="What the cast moves on this GPU: sizes the pool where the trace has no launch grid.",
)


def register(app: typer.Typer) -> None:
    """Add `trace` with its subcommands."""
    trace = typer.Typer(help="Where does a decode step's time go?", no_args_is_help=True)
    trace.command("report")(report)
    trace.command("diff")(diff)
    trace.command("record")(record)
    app.add_typer(trace, name="trace")


def report(
    files: list[Path] = FILES,
    html: Path | None = HTML,
    as_json: bool = JSON,
    sglang: str | None = SGLANG,
    bandwidth: float | None = BANDWIDTH,
) -> None:
    """Explain a trace: classes, the full-pool KV cast, its cousins, and the step without it."""
    from kvlab import outputs
    from kvlab.trace import console

    outputs.check("--html", html)
    found = [pair for file in files for pair in _reports(file, bandwidth, sglang)]
    if html:
        from kvlab.trace.page import write_report

        write_report(html, found)
    if as_json:
        typer.echo(console.report_json([r for _, r in found]))
    else:
        console.print_reports([r for _, r in found])


def diff(
    before: Path = BEFORE,
    after: Path = AFTER,
    html: Path | None = HTML,
    as_json: bool = JSON,
) -> None:
    """Compare two traces per step: by class and kernel, what appeared, what vanished."""
    from kvlab import outputs
    from kvlab.trace import console
    from kvlab.trace.diff import diff_ranks

    outputs.check("--html", html)
    one, two = ([r for f in _files(path) for _, r in _reports(f, None, None)] for path in (before, after))
    change = diff_ranks(one, two)
    if html:
        from kvlab.trace.page import write_diff

        write_diff(html, change)
    if as_json:
        typer.echo(console.diff_json(change))
    else:
        console.print_diff(change)


def record(
    out: Path = OUT,
    url: str = typer.Option("http://127.0.0.1:30000", "--url", help="The running SGLang server."),
    steps: int = typer.Option(5, "--steps", min=1, help="Forward steps to profile."),
    requests: int = typer.Option(
        1, "--requests", min=0, help="Prompts to keep it decoding; 0: rely on its traffic."
    ),
    context: int = typer.Option(100, "--context", min=1, help="About how many tokens a prompt has."),
    tokens: int = typer.Option(256, "--tokens", min=1, help="New tokens of a prompt."),
    shapes: bool = typer.Option(False, "--shapes", help="Record operators' shapes (larger traces)."),
    stack: bool = typer.Option(True, "--stack/--no-stack", help="Record Python frames (slows the host)."),
    thin: bool = typer.Option(
        False, "--thin", help="Keep only what explains kernels: no frames, no operators without a launch."
    ),
    patch: str | None = typer.Option(
        None, "--patch", help="KVLAB_PATCH: what the server runs with; with --one-batch, what to apply."
    ),
    folder: Path | None = FOLDER,
    timeout: float = typer.Option(300.0, "--timeout", help="Seconds to wait for the trace."),
    api_key: str | None = typer.Option(
        None, "--api-key", envvar="KVLAB_API_KEY", help="The key that the server was started with; not kept."
    ),
    seed: int | None = typer.Option(
        None, "--seed", help="With --one-batch: draw the weights of --load-format dummy from this seed."
    ),
    nearest_share: float | None = typer.Option(
        None,
        "--nearest-share",
        min=0,
        max=1,
        help="With --one-batch: of its batches and lengths, keep the trace whose cast has this share.",
    ),
    one_batch: str | None = typer.Option(
        None,
        "--one-batch",
        metavar="ARGS",
        help="Instead of a server, run SGLang's one-batch benchmark with ARGS.",
    ),
) -> None:
    """Record a trace from a running SGLang server, or around SGLang's one-batch benchmark."""
    import shlex

    from kvlab.trace import record as recording

    if one_batch is not None:
        made = recording.around_one_batch(
            shlex.split(one_batch),
            out,
            steps=steps,
            shapes=shapes,
            stack=stack,
            thin=thin,
            seed=seed,
            nearest_share=nearest_share,
            patch=patch or "off",
            timeout=timeout,
        )
    else:
        made = recording.from_server(
            url,
            out,
            steps=steps,
            requests=requests,
            context=context,
            tokens=tokens,
            stack=stack,
            thin=thin,
            shapes=shapes,
            patch=patch,
            folder=folder,
            timeout=timeout,
            api_key=api_key,
        )
    for path in made:
        typer.echo(path)


def _files(path: Path) -> list[Path]:
    """The traces of a run: a file, or all in a folder."""
    from kvlab.errors import BadInput

    if not path.is_dir():
        return [path]
    found = sorted([*path.glob("*.trace.json.gz"), *path.glob("*.trace.json")])
    if not found:
        raise BadInput(f"{path}: no *.trace.json or *.trace.json.gz in this folder; name a trace")
    return found


def _reports(file: Path, bandwidth: float | None, sglang: str | None) -> "list[tuple[Trace, Report]]":
    from kvlab.errors import BadInput
    from kvlab.trace import read, reports

    if bandwidth is not None and not 0 < bandwidth < 100:
        raise BadInput(f"--bandwidth: {bandwidth} is not a rate in TB/s; an H200's cast moves about 1.03")
    trace = read(file)
    speed = None if bandwidth is None else bandwidth * 1e12
    return [(trace, r) for r in reports(trace, bandwidth=speed, sglang=sglang)]
