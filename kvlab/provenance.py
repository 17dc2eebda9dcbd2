"""Where a measured number comes from: GPU, driver, versions, commit, command, date, KVLAB_PATCH."""

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

_PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "sgl-kernel", "flashinfer-python", "transformers")


class Provenance(msgspec.Struct, kw_only=True, frozen=True):
    """Read from the host that measured; never typed in."""

    date: str
    command: str
    commit: str | None
    dirty: bool | None
    python: str
    platform: str
    gpus: list[str]
    driver: str | None
    versions: dict[str, str]
    kvlab: str
    kvlab_patch: str
    env: dict[str, str] = {}


def collect(command: Sequence[str] | None = None, *, env: Sequence[str] = ()) -> Provenance:
    """Provenance of this process. `env` names environment variables that changed what was measured.

    KVLAB_COMMIT stands in for git where the checkout travelled without its history.
    """
    from kvlab import __version__

    gpus, driver = _gpus()
    return Provenance(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=" ".join(_shorten(a) for a in (command or [_program(), *sys.argv[1:]])),
        commit=_git("rev-parse", "HEAD") or os.environ.get("KVLAB_COMMIT"),
        dirty=None if _git("rev-parse", "HEAD") is None else bool(_git("status", "--porcelain")),
        python=platform.python_version(),
        platform=platform.platform(),
        gpus=gpus,
        driver=driver,
        versions=_versions(),
        kvlab=__version__,
        kvlab_patch=os.environ.get("KVLAB_PATCH", "unset"),
        env={k: os.environ[k] for k in env if k in os.environ},
    )


def _program() -> str:
    """How this process was started: `-m package` runs a file named __main__.py, `-m module` its own."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return f"python -m {started.parent.name}"
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return f"python -m {spec.name}" if spec and spec.origin == sys.argv[0] else started.name


def _shorten(arg: str) -> str:
    """An absolute path says where a host keeps its files, which is nobody's business: keep its last part."""
    if " " in arg:  # an argument that holds another program's
        return " ".join(map(_shorten, arg.split(" ")))
    flag, eq, value = arg.partition("=")
    if eq and os.path.isabs(value):
        return f"{flag}={Path(value).name}"
    return Path(arg).name if os.path.isabs(arg) else arg


def _git(*args: str) -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpus() -> tuple[list[str], str | None]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return [], None
    if done.returncode:
        return [], None
    rows = [line.split(", ") for line in done.stdout.splitlines() if ", " in line]
    return [name for name, _ in rows], rows[0][1] if rows else None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
