"""`kvlab serve …`: SGLang's own launcher, patched, for releases that load no plugins."""

import typer


def register(app: typer.Typer) -> None:
    """Add `serve`; every argument is SGLang's."""
    app.command(
        "serve",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(serve)


def serve(context: typer.Context) -> None:
    """Run `sglang.launch_server` with these arguments, patched here and in what it spawns."""
    from kvlab.patch.launch import launch

    launch(context.args)
