"""How does a server of SGLang come up, as its launcher starts it, and how does it end?"""

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvlab.errors import BadInput
from kvlab.patch import verify

# A strategy that is none: the model with a BF16 cache, unpatched.
CONTROL = "control_bf16"


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
            given = without(given, "--kv-cache-dtype")
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


def server_for(
    model: Path,
    strategy: str,
    arguments: Sequence[str],
    python: str,
    port: int | None,
    folder: Path,
    is_seeded: bool,
) -> Server:
    work = Path(tempfile.mkdtemp(prefix=f"{strategy}-", dir=folder))
    return Server(model, strategy, list(arguments), python, port or free_port(), work, is_seeded)


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


def all_ready(up: Sequence[Launched], seconds: float) -> list[float | None]:
    """For each, the seconds that it took to answer; None where it did not come up."""
    ready: dict[int, float] = {}
    while waiting := [n for n in range(len(up)) if n not in ready and _may_come_up(up[n], seconds)]:
        for n in waiting:
            if answers(up[n].server.url):
                ready[n] = time.perf_counter() - up[n].since
        time.sleep(0.25)
    return [ready.get(n) for n in range(len(up))]


def _may_come_up(it: Launched, seconds: float) -> bool:
    return it.process.poll() is None and time.perf_counter() - it.since < seconds


def answers(url: str) -> bool:
    asked = verify.request(f"{url}/health_generate", None)
    with contextlib.suppress(OSError, http.client.HTTPException), verify.opened(asked, 30) as a:
        return a.status == 200
    return False


def last_error(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    except OSError:
        return "no log"
    lines = [line for line in lines if line]
    wrong = [line for line in lines if "kvlab: " in line or "Error" in line]
    return (wrong or lines or ["nothing was logged"])[-1][:300]


def without(arguments: Sequence[str], flag: str) -> list[str]:
    """Without `flag VALUE` and `flag=VALUE`."""
    kept = [a for a in arguments if not a.startswith(f"{flag}=")]
    while flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """What the last `flag VALUE` or `flag=VALUE` gives."""
    found = None
    for one, following in pairwise([*arguments, ""]):
        if one == flag or one.startswith(f"{flag}="):
            found = following if one == flag else one.partition("=")[2]
    return found


def free_port() -> int:
    """A port that is free, below those that the system hands out: SGLang takes others at fixed distances from
    it, up to 10,000 higher, and dies where they pass 65,535.
    """
    for port in random.sample(range(15_000, 32_000), 200):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
    raise BadInput("--port: no free one was found; name one")
