"""`kvlab memory`: how many bytes a KV pool, its casts and its copies take, and whether they fit a card."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvlab.memory import Fit, Pool


def register(app: typer.Typer) -> None:
    """Add `memory`."""
    app.command(name="memory", help=__doc__)(memory)


def memory(
    model: Annotated[str, typer.Option(help="A preset (see kvlab model list), a config.json or its folder.")],
    slots: Annotated[int, typer.Option(help="Slots of the pool: SGLang's #tokens or --max-total-tokens.")],
    active: Annotated[int | None, typer.Option(help="Distinct slots that one step reads.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A card (see kvlab gpus), or live.")] = None,
    weights: Annotated[str | None, typer.Option(help="One rank's weights, e.g. 61GiB.")] = None,
    reserve: Annotated[str, typer.Option(help="Activations, CUDA context and graphs, e.g. 4GiB.")] = "0",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    pp_rank: Annotated[int | None, typer.Option(help="Stage; without it the one with most layers.")] = None,
    pp_partition: Annotated[
        str | None, typer.Option(help="Layers of each stage, as SGLANG_PP_LAYER_PARTITION: 20,20,19,19.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="fp8_e4m3, fp8_e5m2, bf16, fp8_dsa (the 656-byte row) or fp4.")
    ] = "fp8_e4m3",
    page_size: Annotated[int, typer.Option(help="Slots of a page.")] = 1,
    indexer: Annotated[bool, typer.Option("--indexer", help="Count the DSA indexer's rows too.")] = False,
    skip_shared_indexers: Annotated[
        bool,
        typer.Option(
            "--skip-shared-indexers", help="Layers that reuse a top-k have no indexer rows (0.5.23)."
        ),
    ] = False,
    draft: Annotated[bool, typer.Option("--draft", help="Count the MTP draft layers' pool too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    from kvlab import gpus, models
    from kvlab import memory as m
    from kvlab.units import parse_bytes

    geometry = models.load(model)
    pool = m.pool(
        geometry,
        slots,
        kv_dtype=dtype,
        page_size=page_size,
        tp=tp,
        pp=pp,
        pp_rank=pp_rank,
        partition=_partition(pp_partition),
        indexer=indexer,
        draft=draft,
        skip_shared_indexers=skip_shared_indexers,
    )
    if active is not None:
        m.check_active(pool, active)
    fit = m.fit(
        pool,
        gpu=gpus.lookup(gpu) if gpu is not None else None,
        weights=parse_bytes(weights, name="--weights") if weights is not None else None,
        reserve=parse_bytes(reserve, name="--reserve"),
    )
    if as_json:
        typer.echo(json.dumps(report(pool, fit, active), allow_nan=False))
    else:
        _show(pool, fit, active, card=gpus.lookup(gpu).name if gpu is not None else None)


def report(pool: "Pool", fit: "Fit", active: int | None) -> dict[str, object]:
    """The JSON object; bytes are integers."""
    return {
        "model": pool.geometry.name,
        "slots": pool.slots,
        "active": active,
        "dtype": pool.dtype.name,
        "page_size": pool.page_size,
        "tp": pool.rank.tp,
        "pp": pool.rank.pp,
        "pp_rank": pool.rank.pp_rank,
        "layers": pool.rank.layers,
        "heads": pool.rank.heads,
        "row_bytes": pool.row_bytes,
        "indexer_row_bytes": pool.geometry.indexer_row_bytes,
        "layer_bytes": pool.layer_bytes,
        "pool_bytes": pool.pool_bytes,
        "indexer_bytes": pool.indexer_bytes,
        "pool_plus_indexer_bytes": pool.pool_bytes + pool.indexer_bytes,
        "draft_bytes": pool.draft_bytes,
        "shadow_bytes": pool.shadow_bytes,
        "one_layer_shadow_bytes": pool.one_layer_shadow_bytes,
        "cast_traffic_bytes": pool.cast_traffic_bytes,
        "active_bytes": None if active is None else pool.active_bytes(active),
        "active_traffic_bytes": None if active is None else pool.active_traffic_bytes(active),
        "reduction": pool.slots / active if active else None,
        "sglang_tokens": pool.tokens,
        "sglang_allocates_bytes": pool.allocated_bytes,
        "sglang_logs_gb": pool.sglang_logs_gb,
        "capacity_bytes": fit.capacity,
        "weights_bytes": fit.weights,
        "reserve_bytes": fit.reserve,
        "needed_bytes": fit.needed,
        "needed_stock_bytes": fit.needed_stock,
        "fits": fit.fits,
        "fits_stock": fit.fits_stock,
        "largest_pool_slots": fit.largest,
        "largest_pool_slots_stock": fit.largest_stock,
        "unknown": list(fit.unknown),
    }


def _partition(text: str | None) -> list[int] | None:
    from kvlab.errors import BadInput

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"--pp-partition {text!r}: it lists layers, e.g. 20,20,19,19") from None


def _show(pool: "Pool", fit: "Fit", active: int | None, *, card: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    rank, geometry = pool.rank, pool.geometry
    table = Table(
        title=f"{geometry.name}, {pool.slots:,} slots of {pool.dtype.title}, page size {pool.page_size}, "
        f"TP {rank.tp}, PP {rank.pp}",
        title_justify="left",
    )
    for column, justify in (
        ("one rank", "left"),
        ("bytes", "right"),
        ("decimal", "right"),
        ("binary", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)
    rows = [
        ("row of one token, one layer", pool.row_bytes),
        ("rows of one layer", pool.layer_bytes),
        (f"pool, {rank.layers} layers", pool.pool_bytes),
    ]
    if geometry.has_indexer:
        rows.append(("indexer row of one token, one layer", geometry.indexer_row_bytes))
    if pool.indexer:
        rows.append((f"indexer, {pool.indexer_layers} layers", pool.indexer_bytes))
        rows.append(("pool and indexer", pool.pool_bytes + pool.indexer_bytes))
    if pool.draft_layers:
        rows.append((f"MTP draft, layers: {pool.draft_layers}", pool.draft_bytes))
    if pool.dtype.casts:
        rows += [
            ("BF16 shadow of every layer", pool.shadow_bytes),
            ("BF16 shadow of one layer", pool.one_layer_shadow_bytes),
            ("one full cast of one layer moves", pool.cast_traffic_bytes),
        ]
    if active is not None:
        rows.append((f"{active:,} active rows, one layer", pool.active_bytes(active)))
        if pool.dtype.casts:
            rows.append(("a cast of only those moves", pool.active_traffic_bytes(active)))
    rows.append(("SGLang allocates (with padding)", pool.allocated_bytes))
    if fit.needed is not None:
        rows += [
            ("weights + pool + shadow of every layer", fit.needed),
            ("weights + pool + shadow of one layer", fit.needed_stock),
        ]
    if fit.capacity is not None:
        rows.append((f"{card} (driver's total)", fit.capacity))
    for what, n in rows:
        table.add_row(what, f"{n:,}", *_pair(n))

    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    if active:
        console.print(
            f"{pool.slots:,} / {active:,} = {pool.slots / active:,.2f} times as many rows cast as read."
        )
    if not pool.dtype.casts:
        console.print("BF16 rows are read as they are: nothing is cast.")
    console.print(
        f"SGLang logs `#tokens: {pool.tokens}, KV size: {pool.sglang_logs_gb:.2f} GB`; that GB is 2^30 bytes "
        "and counts the padding slots."
    )
    if pool.tokens != pool.slots:
        console.print(f"SGLang rounds {pool.slots:,} slots down to whole pages: {pool.tokens:,}.")
    if geometry.has_indexer and not pool.indexer:
        console.print("The model has a DSA indexer; --indexer counts its rows too.")
    for missing in fit.unknown:
        console.print(f"Whether it fits is unknown without {missing}.")
    if fit.fits is not None:
        for what, fits, needed, largest in (
            ("a shadow of every layer", fit.fits, fit.needed, fit.largest),
            ("one layer cast at a time", fit.fits_stock, fit.needed_stock, fit.largest_stock),
        ):
            console.print(_verdict(what, bool(fits), needed or 0, fit.capacity or 0, largest or 0))
        if not fit.reserve:
            console.print("Activations, CUDA context and captured graphs come on top: --reserve counts them.")


def _verdict(what: str, fits: bool, needed: int, capacity: int, largest: int) -> str:
    from kvlab.units import GIB

    size = f"{needed / GIB:.2f} {'<=' if fits else '>'} {capacity / GIB:.2f} GiB"
    most = f"the largest pool that does has {largest:,} slots" if largest else "not even one page does"
    return f"With {what}: {'fits' if fits else 'does not fit'} ({size}); {most}."


def _pair(n: int) -> tuple[str, str]:
    """`22.26 GB`, `20.74 GiB`; small sizes in smaller units of both kinds."""
    for power, decimal, binary in ((3, "GB", "GiB"), (2, "MB", "MiB"), (1, "kB", "KiB")):
        if n >= 1000**power:
            return f"{n / 1000**power:.2f} {decimal}", f"{n / 1024**power:.2f} {binary}"
    return "", ""
