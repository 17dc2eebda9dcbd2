"""Shared by all tests."""

import contextlib
import os


def pytest_configure(config):
    """`make test` is what needs no GPU: it takes none, so that it does the same on every host."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# SGLang's environments (make test-sglang) have no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    # The same examples each time, and no timing: neither may make a run red.
    settings.register_profile("kvlab", derandomize=True, deadline=None)
    settings.load_profile("kvlab")
