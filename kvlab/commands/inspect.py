"""`kvlab inspect`: what flashinfer's MLA wrapper checks, freezes and wraps, for any release."""

import typer


def register(app: typer.Typer) -> None:
    @app.command("inspect")
    def show(
        flashinfer: str = typer.Option("", help="flashinfer release; the installed one by default."),
        method: str = typer.Option("", help="plan, run or __init__: print its source."),
        as_json: bool = typer.Option(False, "--json", help="One JSON object."),
    ) -> None:
        """What BatchMLAPagedAttentionWrapper refuses, keeps from plan to run, and since when it takes FP8."""
        from kvlab import inspection

        found = inspection.wrapper(flashinfer or None)
        if method:
            chosen = found.method(method)
            if not as_json:
                typer.echo(chosen.source, nl=False)
                return
        if as_json:
            import msgspec

            document = {
                **msgspec.to_builtins(found),
                "frozen": msgspec.to_builtins(found.frozen()),
                "fp8_since": inspection.fp8_since(),
            }
            typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
            return
        typer.echo(f"flashinfer {found.release} ({found.origin}), {inspection.WRAPPER}")
        for m in found.methods:
            typer.echo(f"\n{m.name}({', '.join(m.parameters)})  {m.file}:{m.line}")
            for d in m.decorators:
                typer.echo(f"  wrapped by @{d}")
            for c in m.checks:
                typer.echo(f"  refuses at {c.line}: {c.test}\n      {c.exception}: {c.says}")
        typer.echo("\nKept by plan, read by run, so a replayed graph has the values of capture:")
        for k in found.frozen():
            typer.echo(f"  {k.name} = {k.value}" + ("  (on the host)" if k.host else ""))
        since = ", ".join(f"{kernel} from {release}" for kernel, release in inspection.fp8_since().items())
        typer.echo(f"\nFP8 rows read by the wrapper itself: {since} (SM90)")
