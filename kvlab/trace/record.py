"""Record a trace: from a running SGLang server's profile endpoints, or around SGLang's one-batch benchmark.

What is left is a folder with the traces (a file a rank, the host's paths shortened), `provenance.json` and a
README.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlab import outputs
from kvlab.errors import BadInput
from kvlab.trace.profiler import Server, decoding, post, server_info, stop_profiler
from kvlab.trace.recording import Try, keep, name_of, shape_of
from kvlab.trace.thin import leave_out

__all__ = ["around_one_batch", "from_server", "leave_out", "shares"]


def from_server(
    url: str,
    out: Path,
    *,
    steps: int = 5,
    requests: int = 1,
    context: int = 100,
    tokens: int = 256,
    stack: bool = True,
    thin: bool = False,
    shapes: bool = False,
    patch: str | None = None,
    folder: Path | None = None,
    timeout: float = 300.0,
    api_key: str | None = None,
) -> list[Path]:
    """Profile `steps` forward steps of the server at `url` while it decodes; return the traces in `out`.

    `requests` prompts of about `context` tokens are sent first so that it decodes (0: rely on its traffic),
    each for `tokens` new tokens. `folder`: where the server may write and this process can read (None: a
    temporary one, for a server on this host). `patch`: the KVLAB_PATCH the server was started with, which it
    does not tell. `thin` keeps what `leave_out` leaves. `timeout` in seconds. `api_key`: what the server was
    started with; it is not kept.
    Raises BadInput for a server that does not answer or writes no trace; then nothing is left in `out`.
    """
    server = Server(url.rstrip("/"), api_key)
    info = server_info(server)
    with (
        outputs.new_folder("--out", out) as made,
        tempfile.TemporaryDirectory(prefix="kvlab-trace-", dir=folder) as written,
    ):
        os.chmod(written, 0o777)  # the server may run as another user
        body = {
            "output_dir": written,
            "num_steps": steps,
            "activities": ["CPU", "GPU"],
            "with_stack": stack,
            "record_shapes": shapes,
            "profile_by_stage": False,
        }
        with decoding(server, requests, context, tokens, timeout):
            done = False
            try:
                post(server, "start_profile", body, timeout)
                files = _finished(Path(written), timeout, f"{server.url} wrote no trace in {timeout:.0f} s")
                done = True
            finally:
                if not done:
                    stop_profiler(server)
        request = {**body, "output_dir": "", "requests": requests, "context": context, "tokens": tokens}
        if patch is not None:
            request["kvlab_patch_of_server"] = patch
        return keep(out, made, files, "server", request, info, thin=thin, secret=api_key)


def around_one_batch(
    arguments: Sequence[str],
    out: Path,
    *,
    steps: int = 3,
    shapes: bool = False,
    stack: bool = True,
    thin: bool = False,
    seed: int | None = None,
    nearest_share: float | None = None,
    patch: str = "off",
    timeout: float = 3600.0,
) -> list[Path]:
    """Run SGLang's one-batch benchmark with `arguments` under its profiler, decode only; return the traces.

    One trace a batch size and prompt length that `arguments` name. The benchmark loads no plugins: `patch` is
    applied in its process first, and what it says of itself afterwards is kept. `seed` draws the weights of
    `--load-format dummy` (one rank only; None: SGLang's own). Without `stack` Python frames are not recorded.
    `thin` keeps of each trace what `leave_out` leaves.
    `nearest_share` keeps only the trace in which the KV cast's share of GPU busy time comes nearest to it,
    with the shares of all. Raises BadInput where the benchmark fails or writes no trace; then nothing is left
    in `out`.
    """
    module = _one_batch()
    with (
        outputs.new_folder("--out", out) as made,
        tempfile.TemporaryDirectory(prefix="kvlab-trace-") as written,
    ):
        said, results = Path(written) / "patch.json", Path(written) / "results.jsonl"
        flags = ["--profile", "--profile-stage", "decode", "--profile-steps", str(steps)]
        flags += ["--profile-record-shapes"] if shapes else []
        flags += ["--result-filename", str(results)]
        start = [sys.executable, "-m", "kvlab.trace.onebatch", module, str(said)]
        start += ["-" if seed is None else str(seed), "stack" if stack else "no-stack", *arguments, *flags]
        env = {**os.environ, "SGLANG_TORCH_PROFILER_DIR": written, "KVLAB_PATCH": patch}
        try:
            done = subprocess.run(start, env=env, timeout=timeout, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            raise BadInput(
                f"{module}: not done in {timeout:.0f} s; give fewer tokens or a longer --timeout"
            ) from None
        if done.returncode:
            raise BadInput(f"{module}: exit code {done.returncode}; its own output above says why")
        files = _finished(Path(written), 0.0, f"{module} wrote no trace; give at least 4 output tokens")
        files.sort(key=lambda file: tuple(n or 0 for n in shape_of(file)))
        request = {
            "module": module,
            "arguments": [_bare(a) for a in arguments],
            "steps": steps,
            "stack": stack,
            "seed": seed,
            "patch": patch,
        }
        tries = [] if nearest_share is None else shares(files)
        if nearest_share is not None:
            request["nearest_share"] = nearest_share
            files = [_nearest(files, tries, nearest_share)]
        old = os.environ.get("KVLAB_PATCH")
        os.environ["KVLAB_PATCH"] = patch
        try:
            return keep(
                out,
                made,
                files,
                "one-batch benchmark",
                request,
                {},
                stack=stack,
                thin=thin,
                patch=json.loads(said.read_text("utf-8")) if said.exists() else {},
                results=_lines(results),
                tries=tries,
            )
        finally:
            os.environ.pop("KVLAB_PATCH")
            if old is not None:
                os.environ["KVLAB_PATCH"] = old


def shares(files: Sequence[Path]) -> list[Try]:
    """What share of each trace's GPU busy time its casts have; 0 where it has none. Raises BadInput."""
    from kvlab.trace import read, report

    found = []
    for file in files:
        r = report(read(file))
        cast = r.kv_cast
        batch, context = shape_of(file)
        found.append(
            Try(
                file=name_of(file, many=True),
                batch=batch,
                context=context,
                step_ms=r.step_ms,
                busy_ms=r.busy_ms,
                cast_ms=cast.ms_per_step if cast else 0.0,
                share=cast.share if cast else 0.0,
            )
        )
    return found


def _nearest(files: Sequence[Path], tries: Sequence[Try], share: float) -> Path:
    return min(zip(files, tries, strict=True), key=lambda pair: abs(pair[1].share - share))[0]


def _one_batch() -> str:
    import importlib.util

    if importlib.util.find_spec("sglang") is None:
        raise BadInput("--one-batch: sglang is not installed here; run this in the serving environment")
    for module in ("sglang.benchmark.one_batch", "sglang.bench_one_batch"):
        try:
            if importlib.util.find_spec(module):
                return module
        except ModuleNotFoundError:
            continue
    raise BadInput("--one-batch: this sglang has no one-batch benchmark; record from a server instead")


def _bare(argument: str) -> str:
    return Path(argument).name if os.path.isabs(argument) else argument


def _lines(path: Path) -> list[dict[str, Any]]:
    """The benchmark's own results: its median step without the profiler beside the trace's."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _finished(folder: Path, timeout: float, otherwise: str) -> list[Path]:
    """The traces in a folder once they are written to their end."""
    until = time.monotonic() + timeout
    while True:
        files = sorted(folder.rglob("*.trace.json.gz")) + sorted(folder.rglob("*.trace.json"))
        if files and all(map(_complete, files)):
            sizes = [f.stat().st_size for f in files]
            time.sleep(min(1.0, timeout))
            again = sorted(folder.rglob("*.trace.json.gz")) + sorted(folder.rglob("*.trace.json"))
            if files == again and sizes == [f.stat().st_size for f in again]:
                return files
        elif time.monotonic() >= until:
            raise BadInput(
                f"{otherwise}"
                + (
                    "; only an unfinished one"
                    if files
                    else "; it must write where this process reads: --folder"
                )
            )
        else:
            time.sleep(0.2)


def _complete(file: Path) -> bool:
    try:
        if file.suffix != ".gz":
            return file.read_bytes().rstrip().endswith((b"}", b"]"))
        with gzip.open(file, "rb") as content:
            while content.read(1 << 20):
                pass
    except (EOFError, OSError):
        return False
    return True
