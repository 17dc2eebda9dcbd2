"""SGLang's own load generator, several times in one process: its imports take longer than a short load.

Reads a JSON list of arguments a line, runs `sglang.bench_serving` with them, and answers a line: null or what
went wrong. The generator's own output goes to stderr.
"""

import contextlib
import json
import runpy
import sys
import warnings


def main() -> None:
    with contextlib.suppress(ImportError), contextlib.redirect_stdout(sys.stderr):
        import sglang.bench_serving  # noqa: F401
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(arguments: list[str]) -> str | None:
    sys.argv = ["sglang.bench_serving", *arguments]
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
    except SystemExit as e:
        return None if not e.code else f"exit code {e.code}"
    except Exception as e:
        return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    return None


if __name__ == "__main__":
    main()
