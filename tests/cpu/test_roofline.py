"""The floor of a decode: each resource by hand for one token on one SM, and what padding costs."""

import pytest

from kvlab.kernels import roofline

CHIP = {"bandwidth": 4e12, "sms": 132, "cvt_fp16": 110.0, "cvt_bf16": 51.0, "mma": 1355.0}


def floor(tokens, heads, **more):
    return roofline.floor(tokens, heads, **CHIP | more)


def test_a_token_by_hand():
    one = floor(1, 8, bandwidth=576e6, sms=1, clock_ghz=1e-3)
    assert one.bytes == 576
    assert one.memory_us == pytest.approx(1)
    assert one.conversions == 576 + 512
    assert one.fp16_us == pytest.approx(1088 / 110)
    assert one.heads_in_n_us == pytest.approx(1088 * 8 / 1355)
    assert one.wgmma_us == pytest.approx(1088 * 8 / 2048)
    assert one.heads_in_m_us == pytest.approx(1088 * 64 / 2048)


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 64, 65, 128])
def test_padding_is_to_whole_instructions(heads):
    f = floor(4096, heads)
    assert f.multiply_adds == 1088 * 4096 * heads
    assert f.wgmma_us / floor(4096, 8).wgmma_us == pytest.approx((heads + 7) // 8)
    assert f.heads_in_m_us / floor(4096, 64).heads_in_m_us == pytest.approx((heads + 63) // 64)
    assert f.memory_us == floor(4096, 1).memory_us


def test_a_tile_of_128_tokens_and_64_heads_takes_the_cycles_of_its_two_products():
    f = floor(128, 64, sms=1, clock_ghz=1e-3)
    assert f.wgmma_us == pytest.approx(2304 + 2048)
