"""`kvlab gpus`: the sheet of cards and the one in this machine."""

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `gpus`."""
    app.command(name="gpus", help="The sheet of cards, with sources, and the one in this machine.")(gpus)


def gpus(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    import msgspec

    from kvlab import gpus as sheet
    from kvlab.units import GIB, KIB, MIB, TB

    cards = [sheet.lookup(name) for name in sheet.names()]
    here = sheet.live()
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins({"gpus": cards, "live": here})))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Cards", title_justify="left")
    for column in ("key", "driver's total", "TB/s", "SM", "SMs", "shared/block", "L2", "source"):
        table.add_column(column, justify="left" if column in ("key", "source") else "right")
    for card in cards:
        table.add_row(
            card.key,
            f"{card.memory / GIB:.2f} GiB",
            f"{(card.bandwidth or 0) / TB:.2f}",
            card.sm,
            str(card.sm_count),
            f"{(card.shared_memory_per_block or 0) // KIB} KiB",
            f"{(card.l2 or 0) // MIB} MiB",
            card.source,
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    console.print(
        f"Here: {here.name}, {here.memory / GIB:.2f} GiB" if here else "Here: no NVIDIA card answers."
    )
