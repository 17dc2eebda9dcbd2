"""Triton's interpreter stands in for a GPU where there is none: asked for before triton is imported."""

import os
import sys

import pytest
from gpu_host import has_gpu


def pytest_configure(config):
    if not has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _kernels_get_tensors_of_the_device(request, monkeypatch):
    """What launches a kernel on tensors that a GPU cannot reach fails here too, not on a GPU host alone."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and "device" not in request.fixturenames:

        def refuses(*args, **kwargs):
            pytest.fail("this test launches a kernel: its tensors belong on the `device` fixture")

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", refuses)
