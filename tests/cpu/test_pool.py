"""The live reproduction: what torch.profiler sees move, and what does not."""

import pytest
import torch

from kvlab.errors import BadInput
from kvlab.pool import STRATEGIES, LatentPool, Loop, profile

SMALL, LARGE = 500, 1_500
ROW = 576


def profiled(strategy, slots=SMALL, context=40, **more):
    return profile(strategy, slots=slots, context=context, heads=2, steps=2, layers=2, **more)


def test_the_view_moves_nothing_and_shares_its_bytes():
    found = profiled("stock")
    assert found.view_shares_storage
    assert found.stage("view").allocated == 0
    assert found.stage("view").bytes == 0
    pool = LatentPool(8)
    pool.set_mla_kv_buffer(0, torch.tensor([3]), torch.full((1, ROW), 1.5))
    assert pool.get_key_buffer(0)[3].float().unique().tolist() == [1.5]
    pool.kv_buffer[0][3] = 0x38
    assert pool.get_key_buffer(0)[3].float().unique().tolist() == [1.0]


def test_the_full_cast_follows_the_pool_and_not_the_request():
    small, large, longer = profiled("stock"), profiled("stock", LARGE), profiled("stock", context=80)
    for found, slots in ((small, SMALL), (large, LARGE), (longer, SMALL)):
        assert found.pool_slots == slots + 1
        assert found.stage("cast").allocated == (slots + 1) * ROW * 2
        assert found.stage("cast").bytes == (slots + 1) * ROW * 3


def test_active_casts_follow_the_request_and_not_the_pool():
    for slots in (SMALL, LARGE):
        assert profiled("shadow", slots).stage("cast").allocated == 0
        for context in (40, 80):
            found = profiled("gather", slots, context)
            indices = 4 * (found.tokens + 2)
            kept = found.stage("cast").allocated
            # The median of two steps, a token apart.
            assert kept == pytest.approx(found.tokens * ROW * 2, abs=2 * ROW * 2 + indices)
            assert found.stage("cast").bytes == found.tokens * ROW * 3


@pytest.mark.parametrize("batch", [1, 3])
def test_every_strategy_gives_the_same_bits(batch):
    digests = {profiled(s, batch=batch).bits for s in STRATEGIES}
    assert len(digests) == 1


def test_the_comparison_can_fail():
    """The control: an active row zeroed changes the bits; an unread slot full of NaN bytes does not."""

    def bits(spoil) -> str:
        loop = Loop("shadow", slots=64, context=20, heads=2)
        spoil(loop.pool.kv_buffer[0])
        loop.step()
        return loop.digest.hexdigest()

    untouched = bits(lambda rows: None)
    assert bits(lambda rows: rows[5].fill_(0)) != untouched
    assert bits(lambda rows: (rows[0].fill_(0x7F), rows[40:].fill_(0xFF))) == untouched


def test_the_copy_dominates_what_the_profiler_lists():
    found = profiled("stock", 20_000)
    assert found.operators[0].name == "aten::copy_"
    assert found.cast_share > 0.5


def test_bad_input_is_named():
    with pytest.raises(BadInput, match=r"strategy: expected stock, shadow, gather, got 'fast'"):
        profiled("fast")
    with pytest.raises(BadInput, match=r"pool: 40 slots asked for, 10 of 10 are free"):
        profiled("stock", 10)
    with pytest.raises(BadInput, match=r"pool: expected slots of 1 or more, a whole number, got 0"):
        LatentPool(0)
    with pytest.raises(BadInput, match=r"dtype: expected .*float8_e5m2, got torch.uint8"):
        LatentPool(9, dtype=torch.uint8)
    pool = LatentPool(4)
    with pytest.raises(BadInput, match=r"expected tokens of 0 or more"):
        pool.alloc(-1)
    assert pool.alloc(4).tolist() == [1, 2, 3, 4], "slot 0 stays the padding's"


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"context": -1}, {"steps": 0}, {"heads": 0}, {"layers": 1.5}]
)
def test_counts_that_are_none_are_named(wrong):
    (name,) = wrong
    name = {"context": "tokens"}.get(name, name)
    with pytest.raises(BadInput, match=f"pool: expected {name} of"):
        profile("stock", **({"slots": 40, "context": 4} | wrong))
