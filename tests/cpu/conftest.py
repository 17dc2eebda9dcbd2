"""Triton's interpreter stands in for a GPU where there is none: asked for before triton is imported."""

import os

from gpu_host import has_gpu


def pytest_configure(config):
    if not has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")
