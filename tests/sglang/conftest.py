"""All of this needs a real SGLang release: `make test-sglang` runs it in each one's environment."""

import importlib.util
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]
if importlib.util.find_spec("sglang"):
    sys.path.insert(0, str(_HERE))


def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(autouse=True)
def _unpatched_afterwards(tmp_path, monkeypatch):
    """No test leaves a patch, a run file or a variable behind."""
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("KVLAB_PATCH", raising=False)
    monkeypatch.delenv("KVLAB_PATCH_STRICT", raising=False)
    yield
    from kvlab import patch

    patch.remove()
