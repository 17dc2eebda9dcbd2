"""What the recorded servers in SGLang's rarer modes must show: the README and the book say so of them."""

import json
import re

import pytest

from kvlab import data

MODES = (data.recorded() / "h200-modes" / "modes.json").read_text(encoding="utf-8")


def test_the_file_says_where_it_ran():
    where = json.loads(MODES)["provenance"]
    assert not re.search(r"/(tmp|root|work)/", MODES)
    assert set(where["gpus"]) == {"NVIDIA H200"}
    assert where["versions"]["sglang"] == "0.5.15.post1"
    assert len(where["commit"]) == 40


@pytest.mark.parametrize(
    ("mode", "family", "shown"),
    [
        ("full_prefill", "fa3", "EXTEND attention captured"),
        ("tc_prefill", "flashinfer_mla", "EXTEND forward by graph"),
        ("breakable_prefill", "flashinfer_mla", "EXTEND forward by graph"),
        ("mixed_chunk", "flashinfer_mla", "MIXED forward"),
        ("hicache", "flashinfer_mla", "rows loaded back"),
        ("no_radix", "flashinfer_mla", "weights updated"),
        ("saver", "flashinfer_mla", "bytes released"),
    ],
)
def test_a_mode_that_was_really_on_repeats_stock_to_the_bit(mode, family, shown):
    cases = json.loads(MODES)["cases"]
    stock, ours = cases[f"{mode}_off"], cases[mode]
    for case in (stock, ours):
        assert case["rc"] == case["left"] == 0
        assert case["answers"] == 13
        assert case["a_prompt_token_matters"]
        assert case["distinct_tokens"] > 100
        assert case["mode"]["is_on"]
        assert case["mode"]["counted"][shown] > 0
    assert stock["ranks"] == stock["lines"] == []
    assert ours[f"against_{mode}_off"] == {"answers": 13, "same_tokens": 13, "same_logprobs": 13}
    together = ours["mode"]["together_as_unpatched"]
    assert together["answers"] == together["same_tokens"] >= 30
    (line,) = ours["lines"]
    assert f"{family}, exact: decode shadow, extend shadow" in line
    (rank,) = ours["ranks"]
    assert rank["counters"]["fallbacks"] == {}
    for kind in ("decode", "extend"):
        assert set(rank["counters"]["calls"][f"{family}.{kind}"]) == {"shadow"}


def test_no_server_of_this_release_comes_up_multiplexed():
    cases = json.loads(MODES)["cases"]
    for name in ("pdmux_off", "pdmux_off_again", "pdmux", "pdmux_fast"):
        assert any("object has no attribute 'gpu_id'" in text for text in cases[name]["tail"])
