"""Shared by all tests.

On a GPU host `make test` takes no GPU: it does the same on every host. `make test-gpu`, which is
`pytest tests/cpu tests/gpu`, takes it: what launches kernels in `tests/cpu` launches them there. So a test
that launches a kernel has its tensors on `device`, and one about a host without a GPU takes the GPU away
itself.
"""

import contextlib
import gc
import os

import pytest
from gpu_host import has_gpu


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Before any conftest asks whether there is a GPU."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """What the imports of a collection make stays for good: no collection of garbage walks it again.

    Nor does one begin at every 700 objects: syntax trees of a release are a hundred times as many.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: the GPU, or the CPU through Triton's interpreter. The same tests run on both."""
    return "cuda" if has_gpu() else "cpu"


# SGLang's environments (make test-sglang) have no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    # The same examples each time, and no timing: neither may make a run red.
    settings.register_profile("kvlab", derandomize=True, deadline=None)
    settings.load_profile("kvlab")
