"""`kvlab book`: execute the chapters, build the pages, serve them."""

import datetime
import sys
from typing import NoReturn

import typer

from kvlab.errors import BadInput


def register(app: typer.Typer) -> None:
    book = typer.Typer(
        help="The book: execute its chapters, build the pages, serve them.", no_args_is_help=True
    )
    book.command("build")(build)
    # Typer has no option of two values that repeats: -p reaches run() among its arguments.
    book.command("run", context_settings={"ignore_unknown_options": True})(run)
    book.command("serve")(serve)
    book.command("readme")(readme)
    book.command("picture")(picture)
    app.add_typer(book, name="book")


def _need_extra() -> None:
    import importlib.util

    needed = ("jupyter_book", "papermill", "jupytext", "plotly", "ipykernel")
    if missing := [m for m in needed if importlib.util.find_spec(m) is None]:
        raise BadInput(
            f"book: needs {', '.join(missing)}; install kvlab with its extra, e.g. pip install '.[book]'"
        )


def _fail(problems: list[str]) -> NoReturn:
    for line in problems:
        sys.stderr.write(f"kvlab: {line}\n")
    raise SystemExit(1)


def build(
    run: str | None = typer.Option(
        None, "--run", help="Show this run of book/executed; default: each page's newest."
    ),
) -> None:
    """Check the numbers, execute the chapters that changed, render into _build/html; warnings are errors."""
    _need_extra()
    from kvlab.book import build as builder
    from kvlab.book.pages import checkout
    from kvlab.book.run import CellFailed

    root = checkout()
    try:
        html = builder.build(root, chosen_run=run, say=typer.echo)
    except builder.BuildFailed as e:
        _fail(e.problems)
    except CellFailed as e:
        _fail([str(e)])
    typer.echo(f"{html.relative_to(root)}/index.html")


def run(
    chapters: list[str] = typer.Argument(  # noqa: B008
        None,
        metavar="[-p NAME VALUE]... [CHAPTER]...",
        help="-p sets a parameter, as papermill's does. Chapters to execute; default: all that have code.",
    ),
    live: bool = typer.Option(
        False, "--live", help="Measure in full on this host: sets live in every chapter that has it."
    ),
    plan: bool = typer.Option(
        False, "--plan", help="Say what would run, with which parameters, and run nothing."
    ),
    name: str | None = typer.Option(None, "--name", help="Name of the run's folder; default: the time."),
) -> None:
    """Execute chapters with papermill into book/executed/<run>/; the next build shows them."""
    _need_extra()
    from kvlab.book import run as runner
    from kvlab.book.pages import checkout

    root = checkout()
    names, given = split_parameters(chapters or [])
    selected = runner.select(root, names)
    wanted = runner.parameters_for(selected, given, live)
    stamp = name or datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ") + ("-live" if live else "")
    if not stamp.replace("-", "").replace("_", "").isalnum():
        raise BadInput(f"--name {stamp}: letters, digits, - and _ only")
    if plan:
        executed = runner.runs(root)
        for page in selected:
            values = {**page.parameters, **wanted[page.name]}
            settings = ", ".join(f"{k}={v!r}" for k, v in values.items()) or "no parameters"
            state = runner.why_stale(page, executed) or "current"
            typer.echo(f"{page.name}: {settings} ({state})")
        return
    folder = runner.executed_root(root) / stamp
    try:
        for e in runner.run_all(selected, folder, wanted, root):
            typer.echo(f"{e.kvlab['page']}: executed in {e.kvlab['seconds']:.1f} s")
    except runner.CellFailed as e:
        _fail([str(e)])
    typer.echo(str(folder.relative_to(root)))


def split_parameters(tokens: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Chapters and (name, value) pairs from `symptom -p live true -p seed 1`; BadInput for another option."""
    rest, names, given = iter(tokens), [], []
    for token in rest:
        if token == "-p":
            name, value = next(rest, None), next(rest, None)
            if name is None or value is None:
                raise BadInput("-p wants a name and a value, e.g. -p live true")
            given.append((name, value))
        elif token.startswith("-"):
            raise BadInput(f"no such option: {token}; see kvlab book run --help")
        else:
            names.append(token)
    return names, given


def serve(port: int = typer.Option(8000, "--port", help="Loopback port; 0 takes a free one.")) -> None:
    """Serve the built book on 127.0.0.1 until interrupted."""
    from kvlab.book.pages import checkout
    from kvlab.book.serve import server

    with server(checkout() / "_build" / "html", port) as s:
        typer.echo(f"http://127.0.0.1:{s.server_address[1]}/  (Ctrl-C stops)")
        try:
            s.serve_forever()
        except KeyboardInterrupt:
            return


def readme() -> None:
    """Rewrite README.md's marked figures from the pages' newest executions."""
    _need_extra()
    from kvlab.book import readme as figures
    from kvlab.book import run as runner
    from kvlab.book.pages import checkout, pages

    root = checkout()
    executed = runner.runs(root)
    newest = {p.name: e for p in pages(root) if p.cells and (e := runner.newest(p, executed))}
    typer.echo("README.md rewritten" if figures.rewrite(root, newest) else "README.md is up to date")


def picture() -> None:
    """Draw README's picture from data/recorded again."""
    _need_extra()
    from kvlab.book import picture as svg
    from kvlab.book.pages import checkout

    typer.echo(f"{svg.FILE} {'drawn' if svg.write(checkout()) else 'is up to date'}")
