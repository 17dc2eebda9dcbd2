"""`kvlab patch diff`, applied to the installed release's real source, serves the same bits."""

import subprocess
import sys
import types

import pytest
import torch
from rig import standins, world
from rig.world import ForwardMode, World, fa3, flashinfer_mla

from kvlab.patch import diff, sites, upstream
from kvlab.patch.sites import FAMILIES, installed

MODULES = {"flashinfer_mla": flashinfer_mla, "fa3": fa3}
HELPER = "sglang.srt.layers.attention.active_rows"


def test_it_applies_to_the_installed_release(tmp_path):
    found = installed()
    for family in FAMILIES:
        copy = tmp_path / "sglang" / family.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((found.root / family.path).read_text(encoding="utf-8"), encoding="utf-8")
    text = diff.unified(found)
    subprocess.run(["patch", "-p1", "-s", "-d", str(tmp_path)], input=text, text=True, check=True)
    its = list(sites.find(tmp_path / "sglang"))
    assert {s.state for s in its} == {"left alone"}
    assert (tmp_path / "sglang/srt/layers/attention/active_rows.py").is_file()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_the_changed_methods_give_the_same_bits(family, monkeypatch):
    module = MODULES[family.name]
    found = installed()
    its = [s for s in found.recognised if s.family == family.name]
    text = diff.edited((found.root / family.path).read_text(encoding="utf-8"), family, its)
    monkeypatch.setitem(sys.modules, HELPER, upstream)
    changed = types.ModuleType(module.__name__)
    exec(compile(text, "changed", "exec"), changed.__dict__)
    for name in ("flash_attn_with_kvcache", "merge_state_v2", "merge_state_v2_wrapper"):
        if name in vars(changed):
            setattr(changed, name, getattr(module, name))
    assert standins is not None

    lengths = [5, 17, 9]
    one = World(family.name, max_bs=4).fill()
    for request, n in enumerate(lengths):
        one.allot(request, n)
    for kind, mode, prefix in (
        ("decode", ForwardMode.DECODE, None),
        ("extend", ForwardMode.EXTEND, [n // 2 for n in lengths]),
    ):
        batch = one.batch(mode, lengths, prefix=prefix)
        one.plan(batch)
        tensors = one.tensors(batch)
        want = one.attend(batch, kind, tensors)
        monkeypatch.setattr(
            type(one.backend), f"forward_{kind}", vars(getattr(changed, family.cls))[f"forward_{kind}"]
        )
        got = one.attend(batch, kind, tensors)
        assert torch.equal(want.view(torch.int16), got.view(torch.int16))
    assert upstream._shadows
    upstream._shadows.clear()
    assert found.version == world.RELEASE
