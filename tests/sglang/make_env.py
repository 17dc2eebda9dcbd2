"""The environment of one SGLang release: .venv-sglang-<release>, pinned, made once and by one process at a
time.

    python tests/sglang/make_env.py 0.5.23 [--torch-index URL]

prints the environment's interpreter. Needs Python 3.11 or newer and the standard library only.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("release", choices=sorted(p.stem for p in (HERE / "requirements").glob("*.txt")))
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX") or None)
    asked = parser.parse_args()
    folder = ROOT / f".venv-sglang-{asked.release}"
    with locked(ROOT / ".cache" / f"{folder.name}.lock"):
        install(folder, HERE / "requirements" / f"{asked.release}.txt", asked.torch_index)
    print(folder / "bin" / "python")
    return 0


def install(folder: Path, requirements: Path, torch_index: str | None) -> None:
    """Bring `folder` to what `requirements` and pyproject.toml say; nothing happens where it is there."""
    python = folder / "bin" / "python"
    pins = requirements.read_text(encoding="utf-8")
    third_party = Stamp(folder / ".third-party", f"{sys.version_info[:2]} {pins}")
    if not third_party.is_current():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        torch = re.search(r"^torch==\S+", pins, re.MULTILINE)
        if torch is None:
            raise SystemExit(f"{requirements}: no line torch==VERSION; pin it")
        index = ["--index-url", torch_index] if torch_index else []
        pip(python, *index, torch[0])
        pip(python, "--no-deps", "-r", str(requirements))
        third_party.write()
    ours = Stamp(folder / ".kvlab", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not ours.is_current():
        # No build isolation: hatchling is among the pins.
        pip(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        ours.write()


class Stamp:
    """A file that says what an environment was made from."""

    def __init__(self, path: Path, made_from: str) -> None:
        self._path, self._digest = path, hashlib.sha256(made_from.encode()).hexdigest()

    def is_current(self) -> bool:
        return self._path.is_file() and self._path.read_text(encoding="utf-8") == self._digest

    def write(self) -> None:
        self._path.write_text(self._digest, encoding="utf-8")


def pip(python: Path, *args: str) -> None:
    """Quiet where it goes well, everything it said where not."""
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    raise SystemExit(main())
