"""`kvlab bench cast`."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from kvlab.bench.results import CastRun


def register(bench: typer.Typer) -> None:
    bench.command("cast")(cast)


def cast(
    context: typer.Context,
    recorded: Annotated[bool, typer.Option("--recorded", help="Print the newest recorded run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    pool: Annotated[int, typer.Option(help="Slots of a layer's pool.", min=1)] = 495_552,
    layers: Annotated[int, typer.Option(help="Layers, each with a pool of its own.", min=2)] = 78,
    kv_dtype: Annotated[str, typer.Option(help="fp8_e4m3 or fp8_e5m2.")] = "fp8_e4m3",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    sweep: Annotated[bool, typer.Option("--sweep", help="Time the kernel's variants too.")] = False,
) -> None:
    """The cast of the active slots beside stock's cast of the whole pool: exactness, time, bandwidth."""
    import msgspec

    from kvlab.errors import BadInput

    if recorded:
        from kvlab.bench.recorded import given, newest, refuse_others, spelt, there
        from kvlab.bench.results import CastRun

        refuse_others(context, "pool", "layers", "kv_dtype", "dtype")
        run = newest("cast.json", CastRun)[1]
        for name, value, is_there in (
            ("pool", pool, run.pool_slots),
            ("layers", layers, run.layers),
            ("kv_dtype", kv_dtype, run.kv_dtype),
            ("dtype", dtype, run.dtype),
        ):
            if name in given(context):
                there(spelt(name), [value], [is_there])
    else:
        for name, value, known in (
            ("--kv-dtype", kv_dtype, ("fp8_e4m3", "fp8_e5m2")),
            ("--dtype", dtype, ("bf16", "fp16")),
        ):
            if value not in known:
                raise BadInput(f"{name}: expected {' or '.join(known)}, got {value!r}")
        run = _measure(pool, layers, kv_dtype, dtype, sweep)
    if json:
        typer.echo(msgspec.json.encode(run).decode())
    else:
        _show(run)


def _measure(pool: int, layers: int, kv_dtype: str, dtype: str, sweep: bool) -> "CastRun":
    from kvlab.errors import BadInput

    try:
        from kvlab.bench import cast as bench
    except ModuleNotFoundError as e:
        raise BadInput(f"bench cast: needs {e.name}; install it, or use --recorded") from None
    return bench.measure(pool=pool, layers=layers, kv_dtype=kv_dtype, dtype=dtype, sweep=sweep)


def _show(run: "CastRun") -> None:
    from rich.console import Console

    out = Console(width=110)
    out.print(
        f"{run.gpu}, {run.layers} layers of {run.pool_slots:,} slots x {run.row_bytes} B, "
        f"{run.kv_dtype} to {run.dtype}; {run.provenance.date}"
    )
    for c in run.copies:
        out.print(f"  {c.name}: {c.bytes / 1e6:,.1f} MB in {c.us:,.1f} us = {c.tb_s:.2f} TB/s")
    for f in run.floors:
        does = "reads the count" if f.reads else "does nothing"
        out.print(f"  a launch that {does}, {f.programs} programs of {f.threads} threads: {f.us:.2f} us")
    out.print(table(run))
    for m in run.maps:
        out.print(f"  slot_map, once a step: {m.tokens:,} tokens, {m.distinct:,} distinct: {m.us:.1f} us")
    for m in run.lists:
        out.print(f"  slot_list, once a step: {m.tokens:,} tokens, {m.distinct:,} distinct: {m.us:.1f} us")
    for t in run.shared:
        took = f"{t.cold_us:.2f} us a layer" if t.cold_us else "wrong"
        out.print(f"  {t.requests} requests on one prefix of {t.prefix:,}, from their {t.how}: {took}")
    for n in run.in_loop:
        out.print(f"  {n.slots:,} slots between small kernels: {n.us:.2f} us more a layer")
    for r in run.replays:
        out.print(f"  one graph replayed with {r.tokens:,} tokens: {r.us:.2f} us a layer")


def table(run: "CastRun") -> "Table":
    """One row a shape and way; a result that was wrong has no time."""
    from rich.table import Table

    found = Table(title="us a layer, L2 flushed and warm; TB/s of the bytes that must move")
    for column in ("slots", "order", "limit", "what", "flushed", "warm", "TB/s", "x of stock"):
        found.add_column(column, justify="left" if column in ("order", "what") else "right")
    for shape in run.shapes:
        stock = shape.results["stock"].cold_us
        for name, t in shape.results.items():
            shown = [_number(t.cold_us, 2, t.exact), _number(t.warm_us, 2, t.exact)]
            shown.append(_number(t.tb_s if t.exact else None, 2))
            shown.append(_number(t.cold_us / stock if t.cold_us and stock else None, 4))
            found.add_row(f"{shape.slots:,}", shape.order, _number(shape.limit_us, 2), name, *shown)
    return found


def _number(value: float | None, digits: int, exact: bool = True) -> str:
    if not exact:
        return "wrong"
    return "" if value is None else f"{value:,.{digits}f}"
