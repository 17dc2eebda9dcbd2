"""`kvlab model`: presets, one model's geometry with its sources, and dummy ranks."""

import json
from pathlib import Path
from typing import Annotated

import typer

_MODEL = typer.Argument(help="A preset, a config.json or its folder.")
_JSON = typer.Option("--json", help="One JSON object and nothing else.")


def register(app: typer.Typer) -> None:
    """Add `model list`, `model show` and `model dummy-rank`."""
    group = typer.Typer(help="Shapes of MLA models.", no_args_is_help=True)
    group.command("list", help="The presets.")(list_presets)
    group.command("show", help="One model's geometry, where each value is from, and one rank's share.")(show)
    group.command("dummy-rank", help="Write a rank that SGLang serves with --load-format dummy.")(dummy_rank)
    app.add_typer(group, name="model")


def list_presets(as_json: Annotated[bool, _JSON] = False) -> None:
    from kvlab import models

    names = models.presets()
    typer.echo(json.dumps({"presets": names}) if as_json else "\n".join(names))


def show(
    model: Annotated[str, _MODEL],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    import msgspec

    from kvlab import models

    geometry = models.load(model)
    one = models.rank(geometry, tp=tp, pp=pp)
    fields = msgspec.to_builtins(geometry)
    share = {
        "tp": tp,
        "pp": pp,
        "heads": one.heads,
        "layers": one.layers,
        "latent_dim": geometry.latent_dim,
        "indexer_row_bytes": geometry.indexer_row_bytes,
        "pp_stages": [len(stage) for stage in models.pp_stages(geometry.attention_layers, pp)],
    }
    if as_json:
        typer.echo(json.dumps({**fields, "rank": share}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=geometry.name, title_justify="left")
    for column in ("value", "", "source"):
        table.add_column(column, overflow="fold")
    for key, value in fields.items():
        if key not in ("name", "sources") and value not in (None, ()):
            table.add_row(key, str(value), geometry.sources.get(key, ""))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    console.print(table)
    console.print(
        f"One rank of TP {tp}, PP {pp}: {one.heads} heads, layers {one.first_layer} to {one.end_layer - 1}; "
        f"a latent row has {geometry.latent_dim} values."
    )


def dummy_rank(
    model: Annotated[str, _MODEL],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist or be empty.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the real model.")] = 8,
    experts: Annotated[int, typer.Option(help="Routed experts to keep.")] = 32,
    layers: Annotated[int | None, typer.Option(help="Layers to keep; all by default.")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    from kvlab import dummy, models

    config = dummy.rank_config(models.load(model), tp=tp, experts=experts, layers=layers)
    folder = dummy.write_rank(out, config)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "config": config}))
    else:
        typer.echo(
            f"{folder}: {config['kvlab_rank_of']}; serve it with --model-path {folder} --load-format dummy"
        )
