"""The environment of one SGLang release: .venv-sglang-<release>, pinned, made once and by one process at a
time.

    python tests/sglang/make_env.py 0.5.23 [--torch-index URL]

prints the environment's interpreter. Needs Python 3.11 or newer and the standard library only. torch and
triton are two thirds of an environment and the same in all: where another one of this checkout has them,
their files are linked. torch is pip's, which knows from its configuration where a CPU build is; the rest is
installed by uv where an environment of this checkout has it, and by pip where none has.
"""

import argparse
import contextlib
import csv
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib.util import cache_from_source
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
        torch = re.search(r"^torch==\S+", pins, re.MULTILINE)
        if torch is None:
            raise SystemExit(f"{requirements}: no line torch==VERSION; pin it")
        venv.create(folder, with_pip=True, clear=True)
        if not share(folder, re.findall(r"^(torch|triton)==(\S+)", pins, re.MULTILINE), ROOT.glob(".venv*")):
            venv.create(folder, with_pip=True, clear=True)
        index = ["--index-url", torch_index] if torch_index else []
        pip(python, *index, torch[0])
        install_all(python, "--no-deps", "-r", str(requirements))
        third_party.write()
    ours = Stamp(folder / ".kvlab", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not ours.is_current():
        # No build isolation: hatchling is among the pins.
        pip(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        ours.write()


def share(folder: Path, packages: list[tuple[str, str]], donors: Iterable[Path]) -> bool:
    """Link each (name, version) from the first of `donors`, finished environments, that has it for a CPU.

    Returns False where the file system links nothing; what was linked until then is left. Whatever is not
    found is pip's, which replaces a file and never writes into one: the others keep theirs.
    """
    below = Path("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    finished = [d for d in donors if (d / ".ready").is_file() or (d / ".third-party").is_file()]
    for name, version in packages:
        for site in (d / below for d in sorted(finished) if d != folder):
            info = next(
                (i for v in (version, f"{version}+cpu") if (i := site / f"{name}-{v}.dist-info").is_dir()),
                None,
            )
            # A CUDA build comes with others, and its index decides which.
            if info is None or "Requires-Dist: nvidia-" in (info / "METADATA").read_text(encoding="utf-8"):
                continue
            try:
                with (info / "RECORD").open(newline="", encoding="utf-8") as record:
                    # Scripts, outside, name their environment's interpreter.
                    paths = {row[0] for row in csv.reader(record) if not row[0].startswith("..")}
                for path in sorted(paths | {cache_from_source(p) for p in paths if p.endswith(".py")}):
                    # What is compiled already; Python makes the rest itself, and anew.
                    if not path.endswith(".pyc") or (site / path).is_file():
                        (folder / below / path).parent.mkdir(parents=True, exist_ok=True)
                        os.link(site / path, folder / below / path)
            except OSError:
                return False
            break
    return True


class Stamp:
    """A file that says what an environment was made from."""

    def __init__(self, path: Path, made_from: str) -> None:
        self._path, self._digest = path, hashlib.sha256(made_from.encode()).hexdigest()

    def is_current(self) -> bool:
        return self._path.is_file() and self._path.read_text(encoding="utf-8") == self._digest

    def write(self) -> None:
        self._path.write_text(self._digest, encoding="utf-8")


def install_all(python: Path, *args: str) -> None:
    """By uv, in a tenth of pip's time; by pip where no environment has it or its index does not answer."""
    for uv in sorted(ROOT.glob(".venv*/bin/uv")):
        command = [str(uv), "pip", "install", "-q", "--python", str(python), *args]
        if subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).returncode == 0:
            return
    pip(python, *args)


def pip(python: Path, *args: str) -> None:
    """Quiet where it goes well, everything it said where not."""
    # Python compiles what is imported, a small part of it.
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "--disable-pip-version-check",
        *args,
    ]
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
