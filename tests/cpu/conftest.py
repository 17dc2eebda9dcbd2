"""Triton's interpreter stands in for a GPU where there is none: asked for before triton is imported."""

import os
from pathlib import Path

import pytest

_HAS_GPU = Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
if not _HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: the GPU, or the CPU through the interpreter. The same suite runs on both."""
    return "cuda" if _HAS_GPU else "cpu"
