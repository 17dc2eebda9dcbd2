"""The count of weights: against what the models' reports say, and against the text's 61 GB a GPU."""

import pytest

from kvlab import models
from kvlab.errors import BadInput
from kvlab.weights import weights


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        # The models' reports: 744B parameters of which 40B are active, 671B and 37B, 1,040B and 32B.
        ("glm-5", 744e9, 40e9),
        ("deepseek-v3", 671e9, 37e9),
        ("kimi-k2", 1.04e12, 32e9),
    ],
)
def test_counts_are_the_published_ones(model, total, active):
    w = weights(models.load(model))
    assert w.total == pytest.approx(total, rel=0.02)
    assert w.active == pytest.approx(active, rel=0.04)


def test_one_expert_and_the_head_by_hand():
    w = weights(models.load("glm-5"))
    assert w.expert == 3 * 6144 * 2048
    assert w.head == 154880 * 6144
    assert w.replicated == 78 * 6144 * (2048 + 512 + 64)


def test_bytes_follow_the_format_and_the_ranks():
    w = weights(models.load("glm-5"))
    one = w.rank_bytes(tp=1, mlp="bf16", other="bf16")
    assert one == 2 * w.active
    assert w.rank_bytes(tp=1, mlp="fp8", other="fp8") * 2 == one
    # NVFP4: 9 bytes for 16 weights.
    assert w.rank_bytes(tp=1, mlp="nvfp4", other="nvfp4") == w.active * 9 // 16
    eight = w.rank_bytes(tp=8, mlp="bf16", other="bf16")
    assert 8 * eight == 2 * (w.active + 7 * (w.replicated + w.router))
    held = w.rank_bytes(tp=8, mlp="nvfp4", other="bf16", resident=True)
    # The text reports 61 GB a GPU; norms, buffers and MTP are not counted here.
    assert 0.85 * 61e9 < held < 61 * 2**30


def test_bad_input_is_named():
    with pytest.raises(BadInput, match=r"int3.*nvfp4"):
        weights(models.load("glm-5")).rank_bytes(tp=8, mlp="int3", other="bf16")
    with pytest.raises(BadInput, match=r"deepseek-v2.*vocab_size"):
        weights(models.load("deepseek-v2"))
