"""Triton's interpreter stands in for a GPU where there is none: asked for before triton is imported."""

import os
import sys

import pytest
from gpu_host import has_gpu


def pytest_configure(config):
    if not has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _refuses(*args, **kwargs):
    pytest.fail("this test launches a kernel: its tensors belong on the `device` fixture")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """What launches a kernel on tensors that a GPU cannot reach fails here too, not on a GPU host alone."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        if interpreter is not None and "device" not in item.fixturenames:
            patch.setattr(interpreter.GridExecutor, "__call__", _refuses)
        yield


@pytest.fixture
def no_sglang(monkeypatch):
    """As in an environment without SGLang; that of a GPU host has it."""
    monkeypatch.setitem(sys.modules, "sglang", None)
