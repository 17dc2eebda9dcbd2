"""The command line: finds the commands, turns bad input into one line on stderr and exit code 2."""

import codecs
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
    """Run one command: exit 0 on an answer, 2 on bad input with one line on stderr.

    A package that the command needs and the install lacks, and an output that cannot be written, count as bad
    input too. Ctrl-C exits with 130.
    """
    _write_any_character()
    command = typer.main.get_command(build())
    try:
        code = command.main(
            args=list(sys.argv[1:] if argv is None else argv), prog_name="kvlab", standalone_mode=False
        )
        sys.stdout.flush()
    except BadInput as e:
        _refuse(str(e))
    except SystemExit as e:
        # Typer's own answer to a closed pipe is exit code 1.
        raise SystemExit(0 if isinstance(e.__context__, BrokenPipeError) else e.code) from None
    except BrokenPipeError:
        # The reader of our pipe went away (`| head`): leave quietly, also at interpreter shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "kvlab":
            raise
        _refuse(f"this command needs {e.name}, which is not installed here; {_install(e.name)}")
    except OSError as e:
        # An error of a stream names no file: the disk behind our output is full, say.
        if e.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _refuse(f"the output cannot be written: {e.strerror or e}")
    except Exception as e:
        if type(e).__name__ == "Abort":
            raise SystemExit(130) from None
        # Typer carries its own copy of click in some releases: recognise a usage error by what it offers.
        if not hasattr(e, "format_message"):
            raise
        _refuse(e.format_message() or "no command given; see kvlab --help")
    raise SystemExit(code if isinstance(code, int) else 0)


def _install(module: str) -> str:
    """How one gets `module`; the kernels' torch and triton are the serving environment's to choose."""
    if module in ("torch", "triton"):
        return f"run it where {module} is, or pip install {module}"
    if module == "sglang":
        return "run it in SGLang's environment"
    return "install kvlab with its extra, e.g. pip install '.[book]'"


def _write_any_character() -> None:
    """Let stdout write what its encoding lacks as \\uXXXX, as JSON does, rather than fail (LC_ALL=C)."""

    def escape(e: UnicodeError) -> tuple[str, int]:
        if not isinstance(e, UnicodeEncodeError):
            raise e
        units = e.object[e.start : e.end].encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)), e.end

    codecs.register_error("kvlab.escape", escape)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="kvlab.escape")


def _refuse(message: str) -> NoReturn:
    sys.stderr.write("kvlab: " + " ".join(message.split()) + "\n")
    raise SystemExit(2)
