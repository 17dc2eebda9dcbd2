"""Record a trace: from a running SGLang server's profile endpoints, or around SGLang's one-batch benchmark.

What is left is a folder with the traces (a file a rank, the host's paths shortened), `provenance.json` and a
README.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvlab import provenance
from kvlab.errors import BadInput

# What shapes a decode step, of the hundreds of arguments a server reports.
_ARGS = (
    "version",
    "attention_backend",
    "decode_attention_backend",
    "kv_cache_dtype",
    "page_size",
    "max_total_num_tokens",
    "max_total_tokens",
    "max_running_requests",
    "tp_size",
    "dp_size",
    "pp_size",
    "disable_cuda_graph",
    "cuda_graph_max_bs",
    "quantization",
    "dtype",
    "load_format",
    "speculative_algorithm",
)
_PROMPT = "The cache holds one row for every token and layer. "


class Try(msgspec.Struct, kw_only=True, frozen=True):
    """One batch and prompt length that was tried; `share` is the KV cast's of GPU busy time."""

    file: str
    batch: int | None
    context: int | None
    step_ms: float
    busy_ms: float
    cast_ms: float
    share: float


class Recording(msgspec.Struct, kw_only=True, frozen=True):
    """What provenance.json holds; `server` is what the server said of itself, `request` what was asked.

    `patch` is `kvlab.patch.status()` of the benchmark's process when it was done, `results` the benchmark's
    own lines, `tries` what was weighed where one trace of several was kept.
    """

    provenance: provenance.Provenance
    how: str
    request: dict[str, Any]
    server: dict[str, Any]
    files: list[str]
    patch: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    tries: list[Try] = []


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
    server = _Server(url.rstrip("/"), api_key)
    info = _server_info(server)
    with _result(out) as made, tempfile.TemporaryDirectory(prefix="kvlab-trace-", dir=folder) as written:
        os.chmod(written, 0o777)  # the server may run as another user
        body = {
            "output_dir": written,
            "num_steps": steps,
            "activities": ["CPU", "GPU"],
            "with_stack": stack,
            "record_shapes": shapes,
            "profile_by_stage": False,
        }
        with _load(server, requests, context, tokens, timeout):
            done = False
            try:
                _post(server, "start_profile", body, timeout)
                files = _finished(Path(written), timeout, f"{server.url} wrote no trace in {timeout:.0f} s")
                done = True
            finally:
                if not done:
                    _stop(server)
        request = {**body, "output_dir": "", "requests": requests, "context": context, "tokens": tokens}
        if patch is not None:
            request["kvlab_patch_of_server"] = patch
        return _keep(out, made, files, "server", request, info, thin=thin, secret=api_key)


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
    with _result(out) as made, tempfile.TemporaryDirectory(prefix="kvlab-trace-") as written:
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
        files.sort(key=lambda file: tuple(n or 0 for n in _shape(file)))
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
            return _keep(
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


def _lines(path: Path) -> list[dict[str, Any]]:
    """The benchmark's own results: its median step without the profiler beside the trace's."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def shares(files: Sequence[Path]) -> list[Try]:
    """What share of each trace's GPU busy time its casts have; 0 where it has none. Raises BadInput."""
    from kvlab.trace import read, report

    found = []
    for file in files:
        r = report(read(file))
        cast = r.kv_cast
        batch, context = _shape(file)
        found.append(
            Try(
                file=_name(file, many=True),
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


def _shape(file: Path) -> tuple[int | None, int | None]:
    """Batch size and prompt length, from the name that the one-batch benchmark or `_name` gives a trace."""
    found = re.search(r"_batch(\d+)_input(\d+)_|-b(\d+)-c(\d+)[-.]", file.name)
    return (int(found[1] or found[3]), int(found[2] or found[4])) if found else (None, None)


def _name(file: Path, *, many: bool) -> str:
    """A trace's name in the folder: its stage, the batch and length where there are several, its ranks."""
    stage = re.search(r"[-_](decode|extend|prefill)\.", file.name, re.IGNORECASE)
    batch, context = _shape(file)
    parts = [stage[1].lower() if stage else "decode"]
    parts += [f"b{batch}", f"c{context}"] if many and batch is not None else []
    parts += [f"{k}{int(n):02d}" for k, n in re.findall(r"(TP|DP|PP|EP)-(\d+)", file.name)]
    return "-".join(parts) + ".trace.json.gz"


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


@contextmanager
def _result(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` if all goes well, and is removed if not."""
    if out.exists():
        raise BadInput(f"--out: {out} exists; give a new folder")
    if not out.parent.is_dir():
        raise BadInput(f"--out: {out.parent} is not a folder")
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield made
        os.chmod(made, 0o755)
        os.replace(made, out)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _keep(
    out: Path,
    made: Path,
    files: Sequence[Path],
    how: str,
    request: dict[str, Any],
    info: dict[str, Any],
    *,
    stack: bool = True,
    thin: bool = False,
    patch: dict[str, Any] | None = None,
    results: Sequence[dict[str, Any]] = (),
    tries: Sequence[Try] = (),
    secret: str | None = None,
) -> list[Path]:
    many = len({_shape(f) for f in files}) > 1
    names = [_name(file, many=many) for file in files]
    for file, name in zip(files, names, strict=True):
        shorten_paths(file, made / name, stack=stack)
        if thin:
            leave_out(made / name, made / "thin")
            os.replace(made / "thin", made / name)
    origin = provenance.collect()
    if secret:
        origin = msgspec.structs.replace(origin, command=origin.command.replace(secret, "KEY"))
    recording = Recording(
        provenance=origin,
        how=how,
        request=request,
        server=info,
        files=names,
        patch=patch or {},
        results=list(results),
        tries=list(tries),
    )
    text = msgspec.json.format(msgspec.json.encode(recording), indent=2)
    (made / "provenance.json").write_bytes(text + b"\n")
    (made / "README.md").write_text(_readme(recording), "utf-8")
    return [out / name for name in names]


def _readme(r: Recording) -> str:
    p = r.provenance
    rows = [
        f"# Trace from SGLang's {r.how}, {p.date[:10]}",
        "",
        f"GPUs: {', '.join(sorted(set(p.gpus))) or 'none seen by the recording process'}; driver {p.driver}; "
        f"KVLAB_PATCH={r.request.get('kvlab_patch_of_server', p.kvlab_patch)}.",
        "",
        "Files (paths of the host in them shortened): " + ", ".join(f"`{f}`" for f in r.files) + ".",
        "`provenance.json` has versions, command, what was asked and what the server said of itself.",
    ]
    return "\n".join(rows) + "\n"


_PACKAGES = re.compile(rb'"(?:/[^"/\n]+)+/(?:site|dist)-packages/')
_ABSOLUTE = re.compile(rb'"(?:/[^"/\n]+)+/([^"/\n]+\.py\()')
# The profiler names the file that it wrote, which was a temporary one.
_TRACE_NAME = re.compile(rb'("traceName": ?")/(?:[^"/\n]+/)*')


def shorten_paths(source: Path, target: Path, *, stack: bool = True) -> None:
    """Copy a trace, gzipped, with absolute paths cut to the package or the file.

    Without `stack` the events of Python frames, most of an eager trace, are left out.
    """
    with source.open("rb") as file, target.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as new:
        lines = gzip.GzipFile(fileobj=file) if source.suffix == ".gz" else file
        for line in lines if stack else _without_frames(lines):
            new.write(_TRACE_NAME.sub(rb"\1", _ABSOLUTE.sub(rb'"\1', _PACKAGES.sub(b'"', line))))


def _without_frames(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Drop events of category python_function. Kineto opens and closes an event on lines of their own."""
    rest = iter(lines)
    for line in rest:
        yield line
        if b'"traceEvents"' in line:
            break
    event: list[bytes] = []
    for line in rest:
        if not event and line.rstrip() != b"  {":
            yield line
            continue
        event.append(line)
        if line.rstrip() in (b"  },", b"  }"):
            if not any(b'"cat": "python_function"' in one for one in event):
                yield from event
            event = []
    yield from event


_LAUNCHES = ("cuda_runtime", "cuda_driver")
_EXPLAINS_NOTHING = ("python_function", "ac2g", "overhead")


def leave_out(source: Path, target: Path) -> None:
    """Copy a trace, gzipped, without what explains no kernel: frames, arrows, operators without a launch.

    Less than half of an eager step is left. A report says the same of it, but for frames and modules.
    """
    raw = source.read_bytes()
    document = json.loads(gzip.decompress(raw) if source.suffix == ".gz" else raw)
    events = [e for e in document["traceEvents"] if e.get("cat") not in _EXPLAINS_NOTHING]
    calls: dict[Any, list[float]] = {}
    for event in events:
        if event.get("cat") in _LAUNCHES:
            calls.setdefault((event["pid"], event["tid"]), []).append(event["ts"])
    for found in calls.values():
        found.sort()

    def explains(event: dict[str, Any]) -> bool:
        if event.get("cat") != "cpu_op":
            return True
        mine = calls.get((event["pid"], event["tid"]), [])
        next_call = bisect_left(mine, event["ts"])
        return next_call < len(mine) and mine[next_call] <= event["ts"] + event["dur"]

    document["traceEvents"] = list(filter(explains, events))
    text = json.dumps(document, separators=(",", ":")).encode()
    target.write_bytes(gzip.compress(text, 9, mtime=0))


class _Server(NamedTuple):
    url: str
    api_key: str | None

    def request(self, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(f"{self.url}/{path}", data=data, headers=headers)


def _server_info(server: _Server) -> dict[str, Any]:
    error: Exception | None = None
    for path in ("server_info", "get_server_info"):
        try:
            with urllib.request.urlopen(server.request(path), timeout=30) as reply:
                info = json.load(reply)
        except (OSError, ValueError) as e:
            error = e
            if isinstance(e, urllib.error.HTTPError):
                e.close()
                if e.code in (401, 403):
                    raise BadInput(_refused(server)) from None
            continue
        return {k: info[k] for k in _ARGS if isinstance(info, dict) and info.get(k) is not None}
    if isinstance(error, urllib.error.HTTPError):
        return {}
    raise BadInput(
        f"--url: no SGLang server answers at {server.url} ({_why(error)}); "
        "give its address, e.g. http://127.0.0.1:30000"
    )


def _refused(server: _Server) -> str:
    if server.api_key is None:
        return f"--api-key: {server.url} asks for the key that it was started with; give it"
    return f"--api-key: {server.url} does not take this key; give the one that it was started with"


def _why(error: Exception | None) -> str:
    reason = getattr(error, "reason", None)
    return str(reason if reason is not None else error)


def _post(server: _Server, path: str, body: dict[str, Any], timeout: float) -> bytes:
    url = f"{server.url}/{path}"
    try:
        with urllib.request.urlopen(server.request(path, body), timeout=timeout) as reply:
            return reply.read()
    except urllib.error.HTTPError as e:
        with e:
            text = e.read(500).decode("utf-8", "replace").strip()
        if e.code in (401, 403):
            raise BadInput(_refused(server)) from None
        raise BadInput(f"{url}: HTTP {e.code}: {text or e.reason}") from None
    except TimeoutError:
        raise BadInput(
            f"{url}: no answer in {timeout:.0f} s: the server replies when its steps are done, so it must "
            f"decode; give --requests or send traffic"
        ) from None
    except OSError as e:
        if isinstance(getattr(e, "reason", None), TimeoutError):
            raise BadInput(f"{url}: no answer in {timeout:.0f} s; give --requests or send traffic") from None
        raise BadInput(f"{url}: {_why(e)}") from None


def _stop(server: _Server) -> None:
    """Leave no profiler running in a server that others use."""
    try:
        _post(server, "stop_profile", {}, 60)
    except BadInput as e:
        sys.stderr.write(f"kvlab: could not stop the profiler: {e}\n")


@contextmanager
def _load(server: _Server, requests: int, context: int, tokens: int, timeout: float) -> Iterator[None]:
    """Keep the server decoding: returns once every request has its first token."""
    started = threading.Semaphore(0)
    failed: list[Exception] = []

    def one(number: int) -> None:
        body = {
            # A number first, or the radix cache would share one prefill; about 1.2 tokens a word.
            "text": f"{number} " + _PROMPT * max(1, context // 12),
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
            "stream": True,
        }
        try:
            with urllib.request.urlopen(server.request("generate", body), timeout=timeout) as reply:
                reply.readline()
                started.release()
                while reply.read(65536):
                    pass
        except Exception as e:
            failed.append(e)
            started.release()

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(requests)]
    for t in threads:
        t.start()
    for _ in threads:
        if not started.acquire(timeout=timeout):
            raise BadInput(f"{server.url}/generate: no token in {timeout:.0f} s")
    if failed:
        raise BadInput(f"{server.url}/generate: {_why(failed[0])}")
    yield
    for t in threads:
        t.join(timeout)


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
