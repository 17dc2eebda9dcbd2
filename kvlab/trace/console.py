"""A report and a diff as text and as JSON."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvlab.trace.diff import Diff
from kvlab.trace.report import Report, slowest, spread


def report_json(found: Sequence[Report]) -> str:
    """One object: the slowest rank's report, and with several ranks all of them."""
    return _json(report_dict(found))


def report_dict(found: Sequence[Report]) -> dict[str, Any]:
    """What `--json` prints, as plain types."""
    one = slowest(found)
    data = one.to_dict()
    if len(found) > 1:
        data["ranks"] = [r.to_dict() for r in found]
        data["slowest"] = one.rank
        data["step_spread"] = spread(found)
    return data


def _json(data: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def print_reports(found: Sequence[Report]) -> None:
    """The slowest rank in full, the others in a table."""
    console = Console(highlight=False, soft_wrap=True)
    one = slowest(found)
    if len(found) > 1:
        console.print(_ranks(found))
    _print(console, one)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ranks(found: Sequence[Report]) -> Table:
    difference = spread(found)
    title = (
        "ranks"
        if difference is None
        else f"{len(found)} ranks; the slowest step is {difference:.1%} over the fastest"
    )
    table = Table(
        "rank",
        "steps",
        "step ms",
        "busy ms",
        "cast ms",
        "communication ms",
        title=title,
        title_justify="left",
    )
    last = slowest(found)
    for r in found:
        talk = r.categories.get("communication")
        table.add_row(
            escape(r.rank) + (" (slowest)" if r is last else ""),
            str(r.steps),
            _ms(r.step_ms),
            _ms(r.busy_ms),
            _ms(r.kv_cast.ms_per_step if r.kv_cast else 0.0),
            _ms(talk.ms_per_step if talk else 0.0),
        )
    return table


def _print(console: Console, r: Report) -> None:
    console.print(
        f"[bold]{escape(r.file)}[/bold]  {escape(r.rank)}, {r.device or 'GPU not named'}, "
        f"{r.backend or 'backend not known'}"
    )
    if r.steps:
        graphs = "CUDA graphs" if r.cuda_graphs else "no CUDA graphs"
        batch = f", batch {', '.join(map(str, r.batch))}" if r.batch else ""
        console.print(
            f"{r.steps} decode step{'s' if r.steps > 1 else ''} (by {r.steps_found_by}), {graphs}{batch}: "
            f"{_ms(r.step_ms)} ms a step, GPU busy {_ms(r.busy_ms)}, idle {_ms(r.idle_ms)}, "
            f"wall time under the profiler {_ms(r.wall_ms)}"
        )
        table = Table("class", "ms/step", "of busy", "exposed ms", "launches")
        for name, c in r.categories.items():
            table.add_row(
                name, f"{c.ms_per_step:.3f}", f"{c.share:.1%}", f"{c.exposed_ms:.3f}", f"{c.launches:.0f}"
            )
        console.print(table)
    for phase, count in r.other_steps.items():
        console.print(f"{count} {phase} step{'s' if count > 1 else ''} left out")
    for name in r.unclassified:
        console.print(f"in other, no rule: {name}", markup=False)
    for f in r.diagnosis:
        console.print(f"[bold]{f.what}: {f.verdict}[/bold]")
        console.print("  " + f.text, markup=False)
        if f.do:
            console.print("  What to do: " + f.do, markup=False)
    for note in r.notes:
        console.print("note: " + note, markup=False)


def diff_json(change: Diff) -> str:
    """What `trace diff --json` prints."""
    return _json(change.to_dict())


def print_diff(change: Diff) -> None:
    """The classes, and the kernels that changed most."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{change.before_step_ms:.2f} ms a step before, {change.after_step_ms:.2f} after[/bold] "
        f"({change.delta_ms:+.2f} ms, {change.speedup:.2f} times as fast)"
    )
    table = Table("class", "before ms", "after ms", "change", "of busy before", "after")
    for cls, c in change.categories.items():
        shares = (f"{c.before_share:.1%}", f"{c.after_share:.1%}")
        table.add_row(cls, f"{c.before_ms:.3f}", f"{c.after_ms:.3f}", f"{c.delta_ms:+.3f}", *shares)
    console.print(table)
    if change.ranks:
        _print_rank_changes(console, change)
    table = Table("class", "before ms", "after ms", "change", "", Column("kernel", overflow="fold"))
    moved = [k for k in change.kernels if abs(k.delta_ms) >= 0.0005 or not (k.before_ms and k.after_ms)]
    for k in moved[:20]:
        what = "appeared" if not k.before_launches else "vanished" if not k.after_launches else ""
        table.add_row(
            k.category, f"{k.before_ms:.3f}", f"{k.after_ms:.3f}", f"{k.delta_ms:+.3f}", what, escape(k.short)
        )
    console.print(table)
    if left := len(change.kernels) - len(moved[:20]):
        console.print(f"{left} kernels that changed less are in --json")
    for note in change.notes:
        console.print("note: " + note, markup=False)


def _print_rank_changes(console: Console, change: Diff) -> None:
    table = Table("rank", "step ms before", "after", "cast ms before", "after")
    for r in change.ranks:
        slow = [
            word
            for word, rank in (("before", change.before_rank), ("after", change.after_rank))
            if rank == r.rank
        ]
        label = escape(r.rank) + (f" (slowest {' and '.join(slow)})" if slow else "")
        times = (r.before_ms, r.after_ms, r.before_cast_ms, r.after_cast_ms)
        table.add_row(label, *("-" if t is None else f"{t:.2f}" for t in times))
    console.print(table)
    spreads = [
        f"{s:.1%} {word}"
        for s, word in ((change.before_spread, "before"), (change.after_spread, "after"))
        if s is not None
    ]
    if spreads:
        console.print(f"slowest rank over fastest: {', '.join(spreads)}; all else is of the slowest ranks")
