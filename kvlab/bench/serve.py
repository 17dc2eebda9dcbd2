"""What does the patch do for a server under load? SGLang's own server and load generator, once a strategy.

The servers are loaded one after another on the same GPUs. Each is started as an operator starts it, with
nothing but KVLAB_PATCH between them, asked by `kvlab patch verify` for the tokens that the others must
repeat, and then loaded at each concurrency. Several may start together: a server without requests leaves the
GPU alone.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from kvlab.bench.serve_results import Load, Served, ServeRun
from kvlab.errors import BadInput
from kvlab.patch import policy, verify
from kvlab.provenance import Provenance, collect

CONTROL = "control_bf16"
STRATEGIES = (*policy.CHOICES, CONTROL)


@dataclass(frozen=True)
class Asked:
    """The load: each concurrency in turn, `requests` requests of so many tokens in and out."""

    concurrencies: Sequence[int]
    input_tokens: int
    output_tokens: int
    requests: int | None = None
    """None: twice the concurrency, at least four."""
    verify_tokens: int = 16
    ready_seconds: float = 600.0
    load_seconds: float = 1800.0
    api_key: str | None = None
    """What the servers take; it is not kept."""

    def count(self, concurrency: int) -> int:
        return self.requests or max(2 * concurrency, 4)


def measure(
    model: Path,
    strategies: Sequence[str],
    asked: Asked,
    *,
    server_args: Sequence[str] = (),
    python: str = sys.executable,
    port: int | None = None,
    together: int = 1,
    apart: float = 20.0,
    out: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    then: Callable[["Server"], None] = lambda _: None,
) -> ServeRun:
    """Start, verify, load and stop a server for each strategy; writes `out` after each.

    A folder with a config.json and no weights is served with seeded dummy weights. `together`: so many
    servers start side by side, and each is loaded while the others of its group have nothing to do; they
    share the GPUs' memory, so that no peak is any one's. They start `apart` seconds from each other: what one
    compiled and tuned is there for the next, as for a server that restarts. `then` is called with each server
    that was loaded, while it still runs. A server that does not come up has its `error`, and the next is
    loaded. A key among `server_args` is taken and not kept. Raises BadInput for what no server could be
    started with.
    """
    unknown = [s for s in strategies if s not in STRATEGIES]
    if unknown or not strategies:
        raise BadInput(f"--strategies: {', '.join(unknown) or 'none given'}; use {', '.join(STRATEGIES)}")
    if not (model / "config.json").is_file():
        raise BadInput(f"--model-path: {model} has no config.json; name a model's folder")
    is_seeded = not any(model.glob("*.safetensors"))
    asked = replace(asked, api_key=asked.api_key or _value(server_args, "--api-key"))
    run = ServeRun(
        provenance=_where(asked.api_key),
        model=_named(model),
        server_args=_without(server_args, "--api-key"),
        seeded_dummy_weights=is_seeded,
        servers=[],
    )
    # Before minutes are spent: a file that cannot be written is said now.
    if out is not None:
        write(out, run)
    with tempfile.TemporaryDirectory(prefix="kvlab-serve-") as folder, loader(python, asked.api_key) as load:
        for at in range(0, len(strategies), together):
            group = [
                _server(model, strategy, server_args, python, port and port + n, Path(folder), is_seeded)
                for n, strategy in enumerate(strategies[at : at + together])
            ]
            say(f"{', '.join(server.strategy for server in group)}: starting")
            with contextlib.ExitStack() as live:
                up = []
                for n, server in enumerate(group):
                    time.sleep(apart if n else 0)
                    up.append(live.enter_context(launched(server)))
                ready = _all_ready(up, asked.ready_seconds)
                for server, process, seconds in zip(group, up, ready, strict=True):
                    first = next((s for s in run.servers if s.tokens), None)
                    served = _one(server, seconds, asked, load, first, say, then, is_alone=together == 1)
                    run = msgspec.structs.replace(run, servers=[*run.servers, served])
                    if out is not None:
                        write(out, run)
                    # Its memory is free for the next group, and it is not there for the next load.
                    end(process)
    return run


def measure_url(
    url: str, asked: Asked, *, model: str | None = None, python: str = sys.executable, say: Any = None
) -> ServeRun:
    """Load the server that runs at `url`. `model`: its tokenizer; None asks the server."""
    verify.port_of(url)
    url = url.rstrip("/")
    info = _info(url, asked.api_key)
    if info is None:
        raise BadInput(f"--url: {url} does not answer as an SGLang server; start it or correct the address")
    path = model or info.get("model_path")
    with tempfile.TemporaryDirectory(prefix="kvlab-serve-") as folder, loader(python, asked.api_key) as load:
        served = _loaded(Served(strategy="running"), url, path, asked, load, None, Path(folder), say or _mute)
    return ServeRun(
        provenance=_where(asked.api_key),
        model=Path(path).name if path else url,
        server_args=[],
        seeded_dummy_weights=False,
        servers=[served],
    )


def joined(paths: Sequence[Path]) -> ServeRun:
    """One run of several that measured some servers each, on GPUs of one kind. Provenance is the first one's.

    Answers are compared across runs of the same code; a run of other code keeps its own comparison, and its
    servers their provenance. Raises BadInput where they did not serve the same model in the same way with the
    same versions.
    """
    runs = []
    for path in paths:
        try:
            runs.append(msgspec.json.decode(path.read_bytes(), type=ServeRun))
        except (OSError, msgspec.DecodeError) as e:
            raise BadInput(f"--join: {path}: not a run of bench serve ({e})") from None
    first = runs[0]
    for path, run in zip(paths, runs, strict=True):
        for name, a, b in (
            ("model", first.model, run.model),
            ("server arguments", first.server_args, run.server_args),
            ("versions", first.provenance.versions, run.provenance.versions),
            ("GPUs", set(first.provenance.gpus), set(run.provenance.gpus)),
        ):
            if a != b:
                raise BadInput(f"--join: {path}: other {name} than {paths[0]}: {b} against {a}")
    change, servers = msgspec.structs.replace, []
    tokens = next((s.tokens for run in runs for s in run.servers if s.tokens), None)
    for run in runs:
        for s in run.servers:
            if run.provenance.commit != first.provenance.commit:
                servers.append(change(s, provenance=run.provenance))
            else:
                same = s.tokens == tokens if servers and s.tokens else None
                servers.append(change(s, same_tokens=same))
    return change(first, servers=servers)


def _where(api_key: str | None) -> Provenance:
    """Provenance, the key left out of the command."""
    found = collect(env=["CUDA_VISIBLE_DEVICES"])
    if not api_key:
        return found
    return msgspec.structs.replace(found, command=found.command.replace(api_key, "KEY"))


def _mute(_: str) -> None:
    return


@dataclass(frozen=True)
class Server:
    """One server of SGLang, as its launcher starts it."""

    model: Path
    strategy: str
    arguments: list[str]
    python: str
    port: int
    work: Path
    is_seeded: bool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.work / "log"

    def command(self) -> list[str]:
        given = list(self.arguments)
        if self.is_seeded and "--load-format" not in given:
            given += ["--load-format", "dummy"]
        if self.strategy == CONTROL:
            given = _without(given, "--kv-cache-dtype")
        where = ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        return [self.python, "-m", "sglang.launch_server", *where, *given]

    def environment(self) -> dict[str, str]:
        path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        if self.is_seeded:
            from kvlab.bench import seeded

            path.append(str(seeded.plugin(self.work / "plugin")))
        kept = {k: v for k, v in os.environ.items() if k not in ("SGLANG_PLUGINS", "KVLAB_PATCH_STRICT")}
        return kept | {
            "KVLAB_PATCH": "off" if self.strategy == CONTROL else self.strategy,
            "KVLAB_RUN_DIR": str(self.work / "run"),
            "PYTHONPATH": os.pathsep.join(path),
        }


def _server(
    model: Path,
    strategy: str,
    arguments: Sequence[str],
    python: str,
    port: int | None,
    folder: Path,
    is_seeded: bool,
) -> Server:
    work = Path(tempfile.mkdtemp(prefix=f"{strategy}-", dir=folder))
    return Server(model, strategy, list(arguments), python, port or _free_port(), work, is_seeded)


@dataclass
class Launched:
    """A server's process, what its log is, and since when it runs."""

    server: Server
    process: "subprocess.Popen[bytes]"
    since: float
    is_ended: bool = False


@contextmanager
def launched(server: Server) -> Iterator[Launched]:
    """The process that becomes a server. Ends it and what it started."""
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            server.command(),
            env=server.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    it = Launched(server, process, time.perf_counter())
    try:
        yield it
    finally:
        end(it)


def end(it: Launched) -> None:
    """SIGTERM, which SGLang cleans up after, and SIGKILL for what is left; safe to repeat."""
    if it.is_ended:
        # Its number may be another process's by now.
        return
    it.is_ended = True
    if it.process.poll() is None:
        it.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            it.process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(it.process.pid, signal.SIGKILL)
    it.process.wait()


def _all_ready(up: Sequence[Launched], seconds: float) -> list[float | None]:
    """For each, the seconds that it took to answer; None where it did not come up."""
    ready: dict[int, float] = {}
    while waiting := [n for n in range(len(up)) if n not in ready and _may_come_up(up[n], seconds)]:
        for n in waiting:
            if _answers(up[n].server.url):
                ready[n] = time.perf_counter() - up[n].since
        time.sleep(0.25)
    return [ready.get(n) for n in range(len(up))]


def _may_come_up(it: Launched, seconds: float) -> bool:
    return it.process.poll() is None and time.perf_counter() - it.since < seconds


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health_generate", timeout=30) as a:
        return a.status == 200
    return False


def _one(
    server: Server,
    ready: float | None,
    asked: Asked,
    load: "Loader",
    first: Served | None,
    say: Callable[[str], None],
    then: Callable[[Server], None],
    *,
    is_alone: bool,
) -> Served:
    served = Served(strategy=server.strategy)
    change = msgspec.structs.replace
    with gpu_peak() as peak:
        if ready is None:
            served = change(served, error=f"did not come up: {_last_error(server.log)}")
        else:
            say(f"{server.strategy}: ready after {ready:.0f} s")
            served = change(served, ready_s=ready)
            served = _loaded(served, server.url, str(server.model), asked, load, first, server.work, say)
            then(server)
        if is_alone:
            served = change(served, gpu_peak_bytes=peak())
        else:
            # What a server tells of its memory is what left the GPU meanwhile, the others' too.
            kept = {k: v for k, v in served.memory.items() if k == "token_capacity"}
            served = change(served, memory=kept)
    lines = server.log.read_text(errors="replace").splitlines()
    served = change(served, log_lines=[line for line in lines if "kvlab: " in line])
    if served.error:
        say(f"{server.strategy}: {served.error}")
    return served


def _loaded(
    served: Served,
    url: str,
    model: str | None,
    asked: Asked,
    load: "Loader",
    first: Served | None,
    work: Path,
    say: Callable[[str], None],
) -> Served:
    change = msgspec.structs.replace
    try:
        checked = verify.measure(url, asked.verify_tokens, asked.api_key)
        served = change(served, step_ms=checked["step_ms"], tokens=checked["tokens"])
        if first is not None:
            served = change(served, same_tokens=checked["tokens"] == first.tokens)
        for concurrency in asked.concurrencies:
            one = load.run(url, model, asked, concurrency, work / f"{concurrency}.jsonl")
            say(
                f"{served.strategy}: {concurrency} at once, {one.output_tokens_per_s:,.0f} tokens/s, "
                f"{one.tpot_ms_median:.2f} ms a token"
            )
            served = change(served, loads=[*served.loads, one])
    except BadInput as e:
        served = change(served, error=str(e))
    state = ((_info(url, asked.api_key) or {}).get("internal_states") or [{}])[0]
    patch = _patch_of(url, work, asked.api_key)
    return change(served, memory=state.get("memory_usage") or {}, patch=patch)


def _patch_of(url: str, work: Path, api_key: str | None) -> dict[str, Any] | None:
    """What the server's first scheduler says in its run file, without what names this host."""
    before = os.environ.get("KVLAB_RUN_DIR")
    # Run files are written every few seconds at most.
    if (work / "run").is_dir():
        os.environ["KVLAB_RUN_DIR"] = str(work / "run")
        time.sleep(2.5)
        with contextlib.suppress(BadInput):
            verify.measure(url, 1, api_key)
    try:
        found = verify.local_status(url)
    finally:
        if before is None:
            os.environ.pop("KVLAB_RUN_DIR", None)
        else:
            os.environ["KVLAB_RUN_DIR"] = before
    return found and {k: v for k, v in found.items() if k not in ("pid", "started", "server")}


@dataclass
class Loader:
    """The child process that runs SGLang's load generator."""

    process: "subprocess.Popen[str]"
    errors: Path

    def run(self, url: str, model: str | None, asked: Asked, concurrency: int, out: Path) -> Load:
        """One load. Raises BadInput where the generator fails or a request does."""
        given = arguments(url, model, asked, concurrency, out)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(given) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise BadInput(f"sglang.bench_serving: died: {_last_error(self.errors)}") from None
        answer = _line(self.process, asked.load_seconds)
        if answer is None:
            raise BadInput(f"sglang.bench_serving: no answer: {_last_error(self.errors)}")
        wrong = json.loads(answer)
        if wrong is not None or not out.exists():
            raise BadInput(f"sglang.bench_serving: {wrong or _last_error(self.errors)}")
        found = parse(out.read_text(encoding="utf-8"), asked, concurrency)
        if found.completed != found.requests:
            raise BadInput(
                f"sglang.bench_serving: {found.completed} of {found.requests} requests completed at "
                f"concurrency {concurrency}"
            )
        return found


def _line(process: "subprocess.Popen[str]", seconds: float) -> str | None:
    """The child's next line; None where it ended or took too long."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        return process.stdout.readline() or None
    finally:
        timer.cancel()


@contextmanager
def loader(python: str, api_key: str | None = None) -> Iterator[Loader]:
    """Start it early: it imports while the first server starts. It reads the key from its environment."""
    key = {} if api_key is None else {"OPENAI_API_KEY": api_key}
    with tempfile.NamedTemporaryFile(prefix="kvlab-load-", suffix=".log") as errors:
        process = subprocess.Popen(
            [python, "-m", "kvlab.bench.serve_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.file,
            text=True,
            env={**os.environ, "SGLANG_PLUGINS": "none", **key},
        )
        try:
            yield Loader(process, Path(errors.name))
        finally:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            process.wait()


def arguments(url: str, model: str | None, asked: Asked, concurrency: int, out: Path) -> list[str]:
    """What `sglang.bench_serving` is given: random ids of exact lengths, the radix cache emptied before."""
    given = {
        "--backend": "sglang",
        "--base-url": url,
        "--dataset-name": "random-ids",
        "--random-input-len": asked.input_tokens,
        "--random-output-len": asked.output_tokens,
        "--random-range-ratio": 1.0,
        "--num-prompts": asked.count(concurrency),
        "--max-concurrency": concurrency,
        "--warmup-requests": min(concurrency, 4),
        "--seed": 1,
        "--output-file": out,
    }
    if model is not None:
        given |= {"--model": model, "--tokenizer": model}
    flags = ["--tokenize-prompt", "--flush-cache", "--disable-tqdm"]
    return [*(str(word) for pair in given.items() for word in pair), *flags]


def parse(text: str, asked: Asked, concurrency: int) -> Load:
    """The last line of what `sglang.bench_serving` wrote."""
    try:
        said = json.loads(text.strip().splitlines()[-1])
        return Load(
            concurrency=concurrency,
            requests=asked.count(concurrency),
            completed=said["completed"],
            input_tokens=asked.input_tokens,
            output_tokens=asked.output_tokens,
            seconds=said["duration"],
            output_tokens_per_s=said["output_throughput"],
            total_tokens_per_s=said["output_throughput"] + said["input_throughput"],
            **{
                f"{ours}_ms_{q}": said[f"{q}_{ours}_ms"]
                for ours in ("ttft", "tpot", "itl")
                for q in ("median", "p99")
            },
        )
    except (IndexError, KeyError, ValueError, TypeError) as e:
        raise BadInput(f"sglang.bench_serving: wrote no result that is known ({e})") from None


@contextmanager
def gpu_peak(every: float = 0.5) -> Iterator[Callable[[], int | None]]:
    """Watch the memory in use on the visible GPUs together; the call gives the most seen, in bytes."""
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            used = _gpu_used()
            if used is None:
                return
            seen.append(used)
            stop.wait(every)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(seen, default=None)
    finally:
        stop.set()
        thread.join()


def _gpu_used() -> int | None:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return sum(int(line) for line in done.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _info(url: str, api_key: str | None = None) -> dict[str, Any] | None:
    """The server's description of itself; the endpoint's older name is tried too."""
    for name in ("server_info", "get_server_info"):
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(verify.request(f"{url}/{name}", api_key), timeout=30) as answer,
        ):
            found = json.loads(answer.read())
            if isinstance(found, dict):
                return found
    return None


def _last_error(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    except OSError:
        return "no log"
    lines = [line for line in lines if line]
    wrong = [line for line in lines if "kvlab: " in line or "Error" in line]
    return (wrong or lines or ["nothing was logged"])[-1][:300]


def _without(arguments: Sequence[str], flag: str) -> list[str]:
    """Without `flag VALUE` and `flag=VALUE`."""
    kept = [a for a in arguments if not a.startswith(f"{flag}=")]
    while flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """What the last `flag VALUE` or `flag=VALUE` gives."""
    found = None
    for one, following in pairwise([*arguments, ""]):
        if one == flag or one.startswith(f"{flag}="):
            found = following if one == flag else one.partition("=")[2]
    return found


def _named(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers")
    return (config.get("kvlab_rank_of") and f"{config['kvlab_rank_of']}, {layers} layers") or model.name


def _free_port() -> int:
    """A port that is free, below those that the system hands out: SGLang takes others at fixed distances from
    it, up to 10,000 higher, and dies where they pass 65,535.
    """
    for port in random.sample(range(15_000, 32_000), 200):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
    raise BadInput("--port: no free one was found; name one")


def write(path: Path, run: ServeRun) -> None:
    """Write whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
        part.replace(path)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise BadInput(f"--out: {path}: {e.strerror or e}; name a file in a folder that exists") from None


__all__ = ["Asked", "Server", "arguments", "joined", "measure", "measure_url", "parse", "write"]
