"""`kvlab bench serve`."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvlab.bench.serve_results import Served, ServeRun


def register(bench: typer.Typer) -> None:
    bench.command("serve")(serve)


def serve(
    context: typer.Context,
    server_args: Annotated[
        list[str] | None,
        typer.Argument(help="After --: SGLang's own arguments, alike for every server."),
    ] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Print the newest recorded run of each server.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    model_path: Annotated[
        Path | None,
        typer.Option(help="A model's folder; one of `model dummy-rank` gets seeded dummy weights."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Load this running server instead of starting any.")] = None,
    strategies: Annotated[
        str, typer.Option(help="KVLAB_PATCH of each server in turn; control_bf16 has no FP8 cache.")
    ] = "off,exact,fast",
    concurrency: Annotated[str, typer.Option(help="Requests at once, one load each.")] = "1,16,64",
    input_tokens: Annotated[int, typer.Option(min=1, help="Tokens in, each request.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens out, each request.")] = 64,
    requests: Annotated[int | None, typer.Option(min=1, help="A load; twice its concurrency.")] = None,
    port: Annotated[int | None, typer.Option(help="The servers' port; a free one.")] = None,
    together: Annotated[
        int,
        typer.Option(min=1, help="Servers that start side by side on the same GPUs; loaded one by one."),
    ] = 1,
    api_key: Annotated[
        str | None,
        typer.Option(help="The key that the servers take; it is not kept.", envvar="KVLAB_API_KEY"),
    ] = None,
    ready_seconds: Annotated[float, typer.Option(min=1, help="How long a server may take to start.")] = 600,
    join: Annotated[
        list[Path] | None,
        typer.Option(help="Runs to put together instead, each of some servers on a GPU of its own."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the run here as JSON, server by server.")] = None,
) -> None:
    """SGLang's server under load, unpatched and patched: tokens a second, time per token, first token."""
    import msgspec

    from kvlab import outputs
    from kvlab.bench.serve_results import joined, write
    from kvlab.errors import BadInput

    # Before minutes are spent.
    outputs.check("--out", out)
    if recorded:
        run = _recorded(context, strategies, concurrency, input_tokens, output_tokens)
    else:
        from kvlab.bench import serve as bench

        if [model_path is None, url is None, not join].count(False) != 1:
            raise BadInput("bench serve: give --model-path FOLDER, --url of a running server, or --join FILE")
        asked = bench.Asked(
            _numbers("--concurrency", concurrency),
            input_tokens,
            output_tokens,
            requests,
            ready_seconds=ready_seconds,
            api_key=api_key,
        )
        say = (lambda _: None) if json else (lambda line: typer.echo(line, err=True))
        if join or url is not None:
            run = joined(join) if join else bench.measure_url(str(url), asked, say=say)
        else:
            _needs_sglang()
            assert model_path is not None
            names = [s.strip() for s in strategies.split(",") if s.strip()]
            run = bench.measure(
                model_path,
                names,
                asked,
                server_args=server_args or [],
                port=port,
                together=together,
                out=out,
                say=say,
            )
    if out is not None:
        write(out, run)
    if json:
        typer.echo(msgspec.json.encode(run).decode())
    else:
        _show(run)
    if not recorded and any(s.error for s in run.servers):
        raise typer.Exit(1)


def _recorded(
    context: typer.Context, strategies: str, concurrency: str, input_tokens: int, output_tokens: int
) -> "ServeRun":
    """The newest recorded run and earlier ones with servers that it lacks, of them what was asked for."""
    from msgspec.structs import replace

    from kvlab.bench.recorded import by_date, given, refuse_others, spelt, there
    from kvlab.bench.serve_results import ServeRun, compared

    refuse_others(context, "strategies", "concurrency", "input_tokens", "output_tokens")
    run = compared([run for _, run in by_date("serve.json", ServeRun)])
    asked, servers = given(context), run.servers
    if "strategies" in asked:
        names = (s.strip() for s in strategies.split(",") if s.strip())
        wanted = there("--strategies", names, (s.strategy for s in servers))
        servers = [s for s in servers if s.strategy in wanted]
    for name, values in (
        ("concurrency", _numbers("--concurrency", concurrency)),
        ("input_tokens", [input_tokens]),
        ("output_tokens", [output_tokens]),
    ):
        if name in asked:
            has = (getattr(one, name) for s in servers for one in s.loads)
            wanted = there(spelt(name), values, has)
            servers = [
                replace(s, loads=[one for one in s.loads if getattr(one, name) in wanted]) for s in servers
            ]
    return replace(run, servers=servers)


def _needs_sglang() -> None:
    from kvlab.errors import BadInput
    from kvlab.patch.sites import installed

    if installed().root is None:
        raise BadInput("sglang: not installed in this environment; install it, or use --url or --recorded")


def _numbers(name: str, text: str) -> list[int]:
    from kvlab.errors import BadInput

    if not text or not all(t.strip().isdigit() and int(t) for t in text.split(",")):
        raise BadInput(f"{name}: expected numbers such as 1,16, got {text!r}")
    return [int(t) for t in text.split(",")]


def _show(run: "ServeRun") -> None:
    """A table of the servers of each run: those of another run are not beside them."""
    from itertools import groupby

    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    for where, servers in groupby(run.servers, lambda s: s.provenance or run.provenance):
        sglang = where.versions.get("sglang", "not installed here")
        # The host's GPUs; which of them the servers had is in the provenance.
        gpus = ", ".join(f"{n} x {name}" for name, n in Counter(where.gpus).items()) or "no GPU"
        commit = "" if where.commit is None else f", commit {where.commit[:7]}"
        console.print(f"{run.model}, SGLang {sglang}, host of {gpus}, {where.date}{commit}")
        _table(console, list(servers))


def _table(console: "Console", servers: "list[Served]") -> None:
    from rich.table import Table

    table = Table()
    columns = (
        "server",
        "at once",
        "tokens/s out",
        "ms/token",
        "p99",
        "ms to first",
        "p99",
        "GPU GB",
        "same tokens",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "server" else "right")
    for server in servers:
        peak = "" if server.gpu_peak_bytes is None else f"{server.gpu_peak_bytes / 1e9:.1f}"
        same = {None: "", True: "yes", False: "no"}[server.same_tokens]
        for number, one in enumerate(server.loads):
            head = (server.strategy, peak, same) if number == 0 else ("", "", "")
            table.add_row(
                head[0],
                str(one.concurrency),
                f"{one.output_tokens_per_s:,.1f}",
                f"{one.tpot_ms_median:.2f}",
                f"{one.tpot_ms_p99:.2f}",
                f"{one.ttft_ms_median:.1f}",
                f"{one.ttft_ms_p99:.1f}",
                *head[1:],
            )
    console.print(table)
    for server in servers:
        if server.error:
            console.print(f"{server.strategy}: {server.error}")
