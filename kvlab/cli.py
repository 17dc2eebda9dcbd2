"""The command line: finds the commands, turns bad input into one line on stderr and exit code 2."""

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from kvlab import __version__, commands
from kvlab.errors import BadInput


def build() -> typer.Typer:
    """The Typer app with every module of `kvlab.commands` registered."""
    app = typer.Typer(
        name="kvlab",
        help="Find, explain and remove the full-pool FP8 KV-cache cast in SGLang's MLA backends.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def version(show: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
        if show:
            typer.echo(f"kvlab {__version__}")
            raise typer.Exit

    for module in sorted(m.name for m in pkgutil.iter_modules(commands.__path__)):
        importlib.import_module(f"kvlab.commands.{module}").register(app)
    return app


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command: exit 0 on an answer, 2 on bad input with one line on stderr."""
    command = typer.main.get_command(build())
    try:
        code = command.main(
            args=list(sys.argv[1:] if argv is None else argv), prog_name="kvlab", standalone_mode=False
        )
    except BadInput as e:
        _refuse(str(e))
    except BrokenPipeError:
        # The reader of our pipe went away (`| head`): leave quietly, also at interpreter shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except Exception as e:
        # Typer carries its own copy of click in some releases: recognise a usage error by what it offers.
        if not hasattr(e, "format_message"):
            raise
        _refuse(e.format_message() or "no command given; see kvlab --help")
    raise SystemExit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> NoReturn:
    sys.stderr.write("kvlab: " + " ".join(message.split()) + "\n")
    raise SystemExit(2)
