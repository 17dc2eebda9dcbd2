"""Runs are compared only where Inductor picked the same blocks: what is read, and what is refused."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvlab.bench import tuned

PROVE = Path(__file__).parents[1] / "gpu" / "prove_patch.py"


@pytest.fixture
def prove():
    spec = importlib.util.spec_from_file_location("prove_patch", PROVE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tuner(monkeypatch):
    """A stand-in for Inductor's class, whose module this process has loaded."""
    module = ModuleType("triton_heuristics")

    class CachingAutotuner:
        def __init__(self, name, x, *blocks):
            self.inductor_meta = {"kernel_name": name}
            self.size_hints = {"x": x, "r0_": 8}
            self.launchers = [
                SimpleNamespace(config=SimpleNamespace(kwargs={"XBLOCK": b}, num_warps=2, num_stages=1))
                for b in blocks
            ]

    module.CachingAutotuner = CachingAutotuner
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.triton_heuristics", module)
    return CachingAutotuner


def test_a_pick_is_told_by_kernel_and_sizes_and_what_is_not_picked_yet_is_not(tuner):
    kept = [tuner("sum", 8192, 32), tuner("sum", 131072, 1), tuner("undecided", 64, 1, 8)]
    assert tuned.picks() == {
        "sum (r0_ 8, x 131072)": "XBLOCK 1, num_stages 1, num_warps 2",
        "sum (r0_ 8, x 8192)": "XBLOCK 32, num_stages 1, num_warps 2",
    }
    assert len(kept) == 3


def test_without_inductor_there_is_no_pick(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.runtime.triton_heuristics", raising=False)
    assert tuned.picks() == {}


def a_run(tmp_path, name, *, device="a", picked="XBLOCK 32", logits=("0", "1")):
    section = {"tokens": [[1, 2]], "logits": list(logits)}
    picks = {"sum": picked} if picked else {}
    whole = {
        "case": {"strategy": name},
        "processes": [{"device": device, "tuned": picks}],
        "identity": {"together": section},
    }
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(whole), "utf-8")
    return str(path)


def compared(prove, monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["prove_patch.py", "compare", *args])
    code = prove.main()
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_equal_picks_are_compared_also_across_gpus(prove, tmp_path, monkeypatch, capsys):
    files = a_run(tmp_path, "stock"), a_run(tmp_path, "exact", device="b")
    code, (verdict,), _ = compared(prove, monkeypatch, capsys, *files)
    assert (code, verdict["identical"], verdict["across"]) == (0, True, "")


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"picked": "XBLOCK 1"}, "other blocks for sum"), ({"picked": ""}, "does not say")],
)
def test_other_picks_are_refused_unless_asked_for_and_then_said(
    prove, tmp_path, monkeypatch, capsys, other, reason
):
    files = a_run(tmp_path, "stock"), a_run(tmp_path, "exact", logits=("0", "2"), **other)
    code, verdicts, err = compared(prove, monkeypatch, capsys, *files)
    assert (code, verdicts) == (2, None)
    assert err.startswith("exact.json: ")
    assert reason in err
    code, (verdict,), _ = compared(prove, monkeypatch, capsys, "--across", *files)
    assert (code, verdict["identical"]) == (1, False)
    assert verdict["differ"] == ["together: logits differ from step 1 on"]
    assert reason in verdict["across"]
