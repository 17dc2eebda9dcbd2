"""`kvlab bench`: finds the benchmarks."""

import importlib
import pkgutil

import typer

from kvlab.bench import commands


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure on this host's GPU, or print a recorded run.", no_args_is_help=True)
    for module in sorted(m.name for m in pkgutil.iter_modules(commands.__path__)):
        importlib.import_module(f"{commands.__name__}.{module}").register(bench)
    app.add_typer(bench, name="bench")
