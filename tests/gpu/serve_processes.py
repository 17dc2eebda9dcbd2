"""In what surroundings does a server of prove_serve.py run, when is its turn on the GPU, how does it end?"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from serve_cases import Case


def environment(case: Case, name: str, out: Path, plugin: Path) -> dict[str, str]:
    run = Path("/tmp") / f"kvlab-run-{os.getpid()}-{name}"
    shutil.rmtree(run, ignore_errors=True)
    path = [str(plugin), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if case.altered:
        path.insert(0, str(altered_sglang(out.parent / "altered")))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVLAB_PATCH") and k != "SGLANG_PLUGINS"}
    return kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "KVLAB_RUN_DIR": str(run),
        "KVLAB_TEST_TRIGGER": str(run) + ".trigger",
        "KVLAB_TEST_WITNESS": str(run) + ".witness",
        **({"KVLAB_CACHE": str(run) + ".cache"} if "nvrtc" in name else {}),
        **case.env,
    }


def plugin_folder(folder: Path) -> Path:
    """An installed distribution with one entry point, beside kvlab's: the faults of serve_faults.py, the
    witness.
    """
    info = folder / "kvlab_test-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for name in ("serve_faults.py", "serve_witness.py"):
        shutil.copy(Path(__file__).with_name(name), folder / name)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlab-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkvlab_test = serve_faults:install\n")
    return folder


def altered_sglang(folder: Path) -> Path:
    """The installed SGLang, linked, but for one file whose casts are spelt otherwise."""
    import importlib.util

    spec = importlib.util.find_spec("sglang")
    source = Path(next(iter(spec.submodule_search_locations)))
    parts = ("srt", "layers", "attention", "flashinfer_mla_backend.py")
    target = folder / "sglang"
    if target.exists():
        return folder
    for part in parts:
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                (target / entry.name).symlink_to(entry)
        source, target = source / part, target / part
    text = source.read_text(encoding="utf-8")
    changed = text.replace(".to(\n            q.dtype\n        )", ".type(q.dtype)").replace(
        ".to(q.dtype)", ".type(q.dtype)"
    )
    if changed == text:
        raise SystemExit(f"{source.name}: no cast to alter")
    target.write_text(changed, encoding="utf-8")
    return folder


@contextlib.contextmanager
def gpu(how: int) -> Iterator[None]:
    """Servers start together, and each answers while no other does anything on its GPUs.

    Stock repeats itself only so: its decode plan is copied from one pinned buffer, which the next plan
    overwrites, and nothing waits for the copy (prove_plan_race.py).
    """
    ids = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")
    with contextlib.ExitStack() as held:
        locks = [held.enter_context(Path(f"/tmp/kvlab-gpu-{name}.lock").open("w")) for name in sorted(ids)]
        # All or none: who waits for one GPU keeps no other from its turn.
        while len(locks) > 1 and not all(map(_takes, locks, [how] * len(locks))):
            for lock in locks:
                fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(0.05)
        if len(locks) == 1:
            fcntl.flock(locks[0], how)
        yield


def _takes(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_ready(process: subprocess.Popen[bytes], url: str, seconds: float) -> float | None:
    """Seconds until the server answers a health check; None where it does not."""
    import urllib.request

    start = time.perf_counter()
    while time.perf_counter() - start < seconds and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health_generate", timeout=20) as a:
            if a.status == 200:
                return time.perf_counter() - start
        time.sleep(0.5)
    return None


def end_group(process: subprocess.Popen[bytes]) -> int:
    """End what is left of a process group; how many processes there were but its leader."""
    until = time.perf_counter() + 4
    while (left := others(process.pid)) and process.poll() is not None and time.perf_counter() < until:
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return left


def others(group: int) -> int:
    """Live processes of a group beside its leader."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its = stat.read_text().rpartition(")")[2].split()[:3]
            found += int(its) == group and state != "Z" and stat.parent.name != str(group)
    return found


def provenance() -> str:
    import msgspec

    from kvlab.provenance import collect

    return msgspec.json.encode(collect(env=["CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_DETERMINISTIC"])).decode()


def kvlab(*words: str) -> dict[str, Any]:
    """One kvlab command as an operator types it."""
    done = subprocess.run(
        [sys.executable, "-m", "kvlab", *words], cwd="/tmp", capture_output=True, text=True, timeout=120
    )
    return {"rc": done.returncode, "out": done.stdout.strip()[-6000:], "err": done.stderr.strip()[-600:]}
