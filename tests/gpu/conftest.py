"""GPU tests are skipped by name where there is no CUDA device."""

from pathlib import Path

import pytest
from gpu_host import has_gpu


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    missing = pytest.mark.skip(reason="no CUDA device on this host")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not has_gpu():
                item.add_marker(missing)
