"""The sheet of cards and the live card."""

import sys
from types import SimpleNamespace

import pytest

from kvlab import gpus
from kvlab.errors import BadInput
from kvlab.units import GIB, KIB, MIB

# CUDA C++ Programming Guide, technical specifications: opt-in shared memory per block by compute capability.
SHARED = {(8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}


@pytest.mark.parametrize("key", gpus.names())
def test_every_card_is_complete_and_found_by_each_of_its_names(key):
    card = gpus.lookup(key)
    assert card.source
    assert card.shared_memory_per_block == SHARED[card.compute_capability] * KIB
    # The driver's total is within 10 % of the GB on the box, read either way.
    advertised = int(card.advertised.split()[0])
    assert 0.9 * advertised < card.memory / 10**9 < 1.1 * advertised
    for name in (card.name, card.name.removeprefix("NVIDIA "), key.upper(), *card.aliases):
        assert gpus.lookup(name) is card, name


def test_the_cards_of_the_investigation():
    pro = gpus.lookup("rtx-pro-6000")
    assert (pro.memory, pro.bandwidth, pro.sm, pro.sm_count) == (97887 * MIB, 1_792_000_000_000, "SM120", 188)
    assert pro.shared_memory_per_block == 99 * KIB
    assert gpus.lookup("rtx-pro-6000-server").bandwidth < pro.bandwidth
    h200 = gpus.lookup("NVIDIA H200")
    assert (h200.sm, h200.sm_count, h200.bandwidth) == ("SM90", 132, 4_800_000_000_000)
    assert round(h200.memory / GIB, 1) == 140.4


def test_an_unknown_card_gets_the_nearest_names():
    with pytest.raises(BadInput, match=r"did you mean rtx-pro-6000 "):
        gpus.lookup("rtx-pro-600")
    with pytest.raises(BadInput, match="the sheet has"):
        gpus.lookup("voodoo2")


def smi(monkeypatch, stdout):
    monkeypatch.setattr(gpus.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=stdout))


def test_the_live_card_has_the_drivers_memory_and_the_sheets_bandwidth(monkeypatch):
    smi(monkeypatch, "NVIDIA H200, 143000, 9.0\n")
    card = gpus.lookup("live")
    assert (card.memory, card.bandwidth, card.key) == (143000 * MIB, 4_800_000_000_000, "h200")
    assert "driver" in card.source


def test_a_live_card_that_the_sheet_lacks_keeps_what_the_driver_says(monkeypatch):
    smi(monkeypatch, "NVIDIA Imaginary 1, 1024, 13.1\n")
    card = gpus.live()
    assert (card.name, card.memory, card.sm, card.bandwidth) == (
        "NVIDIA Imaginary 1",
        1024 * MIB,
        "SM131",
        None,
    )


@pytest.mark.parametrize("stdout", ["", "No devices were found\n", "x, [N/A], 9.0\n"])
def test_without_an_answer_there_is_no_live_card(monkeypatch, stdout):
    smi(monkeypatch, stdout)
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    )
    assert gpus.live() is None
    with pytest.raises(BadInput, match="no NVIDIA card"):
        gpus.lookup("live")


def test_torch_answers_where_nvidia_smi_does_not(monkeypatch):
    smi(monkeypatch, "")
    props = SimpleNamespace(name="NVIDIA H200", total_memory=7, major=9, minor=0)
    cuda = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda index: props)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert gpus.live().memory == 7
