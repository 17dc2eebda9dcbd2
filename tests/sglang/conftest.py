"""All of this needs a real SGLang release: `make test-sglang` runs it in each one's environment."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_spec = importlib.util.find_spec("sglang")
# This very folder may look like a namespace package of that name.
_HAS_SGLANG = _spec is not None and _spec.origin is not None
collect_ignore_glob = [] if _HAS_SGLANG else ["test_*.py"]
if _HAS_SGLANG:
    sys.path.insert(0, str(_HERE))
    # SGLang asks for a GPU as it is imported.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

_CLASSES = {
    "sglang.srt.layers.attention.flashattention_backend": "FlashAttentionBackend",
    "sglang.srt.layers.attention.flashinfer_mla_backend": "FlashInferMLAAttnBackend",
}


def pytest_configure(config):
    # SGLang and what it imports warn by the dozen; only our own warnings are errors here.
    if _HAS_SGLANG:
        config.addinivalue_line("filterwarnings", "ignore")
        config.addinivalue_line("filterwarnings", "error:::kvlab")


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
    # monkeypatch puts its things back after this fixture: what the test before left is seen here.
    for module, name in _CLASSES.items():
        methods = vars(getattr(sys.modules.get(module), name, object))
        for method in ("forward_decode", "forward_extend"):
            where = getattr(methods.get(method), "__globals__", {}).get("__name__", module)
            assert where == module, f"a test before left {where}'s function as {name}.{method}"
    yield
    from kvlab import patch
    from kvlab.patch import api

    patch.remove()
    api._captured.clear()
