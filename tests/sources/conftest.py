"""Real releases, downloaded once into .cache with pip, read or imported from there; no GPU needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.backends import sources

# What flashinfer's Python needs to be imported beside the test environment, without its own dependencies.
_FLASHINFER_NEEDS = ("apache-tvm-ffi", "nvidia-ml-py")


@pytest.fixture(scope="session")
def release():
    """`release("sglang", "0.5.9")`: the source tree of a release."""
    return sources.fetch


@pytest.fixture(scope="session")
def flashinfer_needs() -> Path:
    """A folder with the two packages that flashinfer imports and the test environment lacks."""
    folder = sources.cache_root() / "sources" / "flashinfer-needs"
    if not (folder / "complete").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        command += ["--upgrade", "--target", str(folder), *_FLASHINFER_NEEDS]
        subprocess.run(command, check=True, capture_output=True)
        (folder / "complete").touch()
    return folder


@pytest.fixture(scope="session")
def in_flashinfer(flashinfer_needs):
    """`in_flashinfer("0.6.3", code)`: run code where that real flashinfer is importable; its stdout."""

    def run(version: str, code: str) -> str:
        tree = sources.fetch("flashinfer-python", version, whole=True)
        path = os.pathsep.join([str(tree.root), str(flashinfer_needs)])
        # Importing writes a JIT workspace below the home that it finds.
        home = sources.cache_root() / "sources" / "flashinfer-home"
        home.mkdir(exist_ok=True)
        env = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": path,
            "FLASHINFER_WORKSPACE_BASE": str(home),
            "HOME": str(home),
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
