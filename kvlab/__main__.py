"""`python -m kvlab`."""

import sys


def main() -> None:
    """The command line; where what it is made with is missing, one line and exit code 2."""
    try:
        from kvlab.cli import main as run
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] == "kvlab":
            raise
        get = "pip install typer rich msgspec"
        print(f"kvlab: {e.name} is not installed, and the command line needs it: {get}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
