"""`kvlab suspects`: is it GEMM, routing, communication? Bounds beside measurements, with verdicts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvlab.suspects import Analysis
    from kvlab.suspects.results import LiveRun

_WHERE = "Verdicts"
_CASE = "The step"
_HOST = "Assumptions about the host"


def register(app: typer.Typer) -> None:
    """Add `suspects`."""
    app.command("suspects")(suspects)


def suspects(
    model: Annotated[str, typer.Option(help="A preset or a config.json.", rich_help_panel=_CASE)] = "glm-5",
    gpu: Annotated[
        str, typer.Option(help="A card of `kvlab gpus`, or live.", rich_help_panel=_CASE)
    ] = "rtx-pro-6000",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", rich_help_panel=_CASE)] = 8,
    batch: Annotated[int, typer.Option(help="Requests of a step.", rich_help_panel=_CASE)] = 1,
    context: Annotated[int, typer.Option(help="Tokens of a request.", rich_help_panel=_CASE)] = 100,
    slots: Annotated[int, typer.Option(help="Slots of the KV pool.", rich_help_panel=_CASE)] = 495_552,
    weights_dtype: Annotated[
        str,
        typer.Option(help="Experts and dense MLPs: nvfp4, fp8 or bf16.", rich_help_panel=_CASE),
    ] = "nvfp4",
    attention_dtype: Annotated[
        str, typer.Option(help="Attention, router and head: bf16, fp8 or nvfp4.", rich_help_panel=_CASE)
    ] = "bf16",
    kv_dtype: Annotated[
        str, typer.Option(help="fp8 or bf16; a BF16 cache is not cast.", rich_help_panel=_CASE)
    ] = "fp8",
    step_ms: Annotated[
        float | None, typer.Option(help="What the step takes, ms.", rich_help_panel=_CASE)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace of this very step: its time and its kernels.", rich_help_panel=_CASE),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Memory, TB/s; the data sheet's.", rich_help_panel=_HOST)
    ] = None,
    link_bandwidth: Annotated[
        float | None,
        typer.Option(help="Between cards, GB/s a direction; the link's peak.", rich_help_panel=_HOST),
    ] = None,
    link_latency: Annotated[
        float | None,
        typer.Option(help="One hop of an all-reduce, us; NCCL's own model.", rich_help_panel=_HOST),
    ] = None,
    all_reduce: Annotated[str, typer.Option(help="ring or one-shot.", rich_help_panel=_HOST)] = "ring",
    cuda_graphs: Annotated[
        bool, typer.Option(help="Whether a step is one launch for the host.", rich_help_panel=_HOST)
    ] = True,
    slack: Annotated[
        float,
        typer.Option(help="Times its bound that an unmeasured part is granted.", rich_help_panel=_WHERE),
    ] = 5.0,
    threshold: Annotated[
        float, typer.Option(help="Share of the gap that makes a suspect.", rich_help_panel=_WHERE)
    ] = 0.2,
    recorded: Annotated[bool, typer.Option("--recorded", help="The recorded H200 step alone.")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Time GEMM, routing, norms and all-reduce on this host's cards.")
    ] = False,
    device: Annotated[str, typer.Option(help="For --live: cuda or cpu.")] = "cuda",
    batches: Annotated[str, typer.Option(help="For --live: batches to time.")] = "1,16",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    """What a decode step should cost by parts, beside what was measured: ruled out, or worth looking at.

    Without options: the source text's step, and the recorded H200 step after it.
    """
    import msgspec

    from kvlab import suspects as s
    from kvlab.suspects.cases import analyse_case

    if live:
        run = _live(model, tp, batches, device)
        if as_json:
            typer.echo(msgspec.json.encode(run).decode())
        else:
            _show_run(run)
        return
    if recorded:
        analyses = [s.recorded_rank(slack=slack, threshold=threshold)]
    else:
        step = _step(trace) if trace is not None else None
        one, assumed = s.case(
            model=model,
            gpu=gpu,
            tp=tp,
            batch=batch,
            context=context,
            slots=slots,
            mlp=weights_dtype,
            other=attention_dtype,
            kv_dtype=kv_dtype,
            cuda_graphs=cuda_graphs,
            bandwidth=None if bandwidth is None else bandwidth * 1e12,
            algorithm=all_reduce,
            link_bandwidth=None if link_bandwidth is None else link_bandwidth * 1e9,
            link_hop_us=link_latency,
            step=step,
        )
        found = analyse_case(one, assumed, step_ms=step_ms, step=step, slack=slack, threshold=threshold)
        analyses = [found, s.recorded_rank(slack=slack, threshold=threshold)]
    if as_json:
        answer = msgspec.to_builtins(analyses[0])
        if len(analyses) > 1:
            answer["recorded"] = msgspec.to_builtins(analyses[1])
        typer.echo(msgspec.json.encode(answer).decode())
        return
    for found in analyses:
        _show(found)


def _step(path: Path):  # noqa: ANN202
    from kvlab import trace
    from kvlab.suspects.recorded import by_suspect

    return by_suspect(trace.report(trace.read(path)))


def _live(model: str, tp: int, batches: str, device: str) -> "LiveRun":
    from kvlab.errors import BadInput

    try:
        sizes = [int(b) for b in batches.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise BadInput(f"--batches {batches!r}: whole numbers of 1 or more, e.g. 1,16")
    if device not in ("cuda", "cpu"):
        raise BadInput(f"--device {device!r}: cuda or cpu")
    from kvlab.suspects.live import measure

    return measure(model=model, tp=tp, batches=sizes, device=device)


def _show(found: "Analysis") -> None:
    from rich.table import Table

    console = _console()
    table = Table(title=found.case, title_justify="left")
    for column in (
        "suspect",
        "bound ms",
        "by",
        "in this step",
        "elsewhere",
        "at most",
        "of the gap",
        "verdict",
    ):
        table.add_column(column, justify="left" if column in ("suspect", "by", "verdict") else "right")
    for s in found.suspects:
        table.add_row(
            s.title,
            f"{s.bound_ms:.3f}",
            s.bound.by,
            _ms(s.measured_ms),
            _ms(s.elsewhere_ms),
            f"{s.most_ms:.2f}",
            "" if s.share is None else f"{s.share:.1%}",
            s.verdict,
        )
    console.print(table)
    if found.step_ms is not None and found.gap_ms is not None and found.unexplained_ms is not None:
        console.print(
            f"step {found.step_ms:.2f} ms ({found.step_from}), bounds together {found.floor_ms:.2f} ms: "
            f"a gap of {found.gap_ms:.2f} ms. All but the cast explain {found.explained_ms:.1f} ms at most; "
            f"{found.unexplained_ms:.1f} ms are left."
        )
        console.print(f"Left standing: {', '.join(found.left_standing) or 'none'}.")
        later = [name for name, v in found.after.items() if v == "worth looking at"]
        if later and found.after_gap_ms is not None:
            console.print(
                f"With the cast gone the gap is {found.after_gap_ms:.1f} ms; then worth looking at: "
                f"{', '.join(later)}."
            )
    console.print(f"Rule: {found.rule}.")
    for source in dict.fromkeys(s.elsewhere_from for s in found.suspects if s.elsewhere_from):
        console.print(f"  elsewhere: {source}")
    for line in found.assumptions:
        console.print(f"  assumed: {line}")
    for line in found.notes:
        console.print(f"  {line}")
    console.print()


def _show_run(run: "LiveRun") -> None:
    from rich.table import Table

    console = _console()
    for shape in run.shapes:
        table = Table(
            title=f"{run.device}: {run.model}, TP {run.tp}, batch {shape.batch}", title_justify="left"
        )
        for column in ("what", "part", "format", "m x n x k", "groups", "times", "us", "TB/s"):
            table.add_column(column, justify="left" if column in ("what", "part", "format") else "right")
        for p in shape.products:
            speed = "" if p.us is None else f"{p.bytes / p.us / 1e6:.2f}"
            us = p.reason or "" if p.us is None else f"{p.us:.2f}"
            table.add_row(
                p.name, p.part, p.format, f"{p.m} x {p.n} x {p.k}", str(p.groups), str(p.times), us, speed
            )
        for small in shape.small:
            table.add_row(small.name, small.suspect, "", "", "", str(small.times), f"{small.us:.2f}", "")
        console.print(table)
    for r in run.reduces:
        right = "" if r.correct else ", WRONG SUM"
        console.print(f"all-reduce, {r.backend}, {r.ranks} ranks, {r.bytes:,} B: {r.us:.1f} us{right}")
    for line in run.reduces_skipped:
        console.print(f"all-reduce skipped: {line}")
    console.print(f"copy {run.copy_bandwidth / 1e12:.2f} TB/s; one kernel of a graph {run.kernel_us:.2f} us")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _console():  # noqa: ANN202
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    return console
