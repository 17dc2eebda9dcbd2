"""Shared by all tests."""

import contextlib

# SGLang's environments (make test-sglang) have no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    # The same examples each time, and no timing: neither may make a run red.
    settings.register_profile("kvlab", derandomize=True, deadline=None)
    settings.load_profile("kvlab")
