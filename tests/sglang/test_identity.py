"""Bit for bit: every site, both FP8 formats, stock against patched, on the real backends and pools."""

import random

import pytest
import torch
from rig.world import ForwardMode, Shape, World

from kvlab import patch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SITES = [(family, kind) for family in ("flashinfer_mla", "fa3") for kind in ("decode", "extend")]
EXACT = ("shadow", "gather")


def run(world, batch, kind, tensors, layers=None):
    """All layers of one step: outputs, and the pool's bytes afterwards."""
    world.plan(batch)
    out = [world.attend(batch, kind, tensors, layer) for layer in layers or range(world.shape.layers)]
    return out, [b.clone() for b in world.pool.kv_buffer]


def assert_same(world, batch, kind, strategy, *, served=None):
    """Stock, then patched from the same pool: the same outputs and the same bytes written."""
    before = [b.clone() for b in world.pool.kv_buffer]
    tensors = world.tensors(batch)
    with world.unpatched():
        want, want_pool = run(world, batch, kind, tensors)
    for b, was in zip(world.pool.kv_buffer, before, strict=True):
        b.copy_(was)
    with patch.applied(strategy):
        got, got_pool = run(world, batch, kind, tensors)
        calls = patch.status()["counters"]["calls"].get(f"{world.family}.{kind}", {})
        fallbacks = patch.status()["counters"]["fallbacks"]
    for layer, (a, b) in enumerate(zip(want, got, strict=True)):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), f"layer {layer} differs"
    assert all(torch.equal(a, b) for a, b in zip(want_pool, got_pool, strict=True))
    if world.shape.layers and len(batch.seq_lens):
        assert calls == {served or strategy: world.shape.layers}
        assert served == "stock" or not fallbacks
    return want


def batch_of(world, kind, lengths):
    if kind == "decode":
        return world.batch(ForwardMode.DECODE, lengths)
    return world.batch(ForwardMode.EXTEND, lengths, prefix=[n // 2 for n in lengths])


def with_requests(family, fp8, lengths, **kwargs):
    world = World(family, fp8, max_bs=max(len(lengths), 1), **kwargs).fill()
    for request, n in enumerate(lengths):
        world.allot(request, n)
    return world


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("fp8", FP8, ids=("e4m3", "e5m2"))
@pytest.mark.parametrize(("family", "kind"), SITES)
def test_each_site_gives_stock_s_bits(family, kind, fp8, strategy):
    lengths = [5, 17, 1, 40]
    world = with_requests(family, fp8, lengths)
    want = assert_same(world, batch_of(world, kind, lengths), kind, strategy)
    assert all(t.isfinite().all() and t.abs().sum() > 0 for t in want)


@pytest.mark.parametrize("dtype", [torch.float16], ids=["fp16"])
@pytest.mark.parametrize(("family", "kind"), SITES)
def test_fp16_queries(family, kind, dtype):
    lengths = [3, 9]
    world = with_requests(family, torch.float8_e4m3fn, lengths, shape=Shape(dtype=dtype))
    assert_same(world, batch_of(world, kind, lengths), kind, "shadow")


@pytest.mark.parametrize("fp8", FP8, ids=("e4m3", "e5m2"))
@pytest.mark.parametrize(("family", "kind"), SITES)
def test_the_real_row_of_576_and_the_default_policy(family, kind, fp8):
    lengths = [2, 33]
    shape = Shape(layers=1, heads=8, rank=512, rope=64)
    world = with_requests(family, fp8, lengths, slots=4096, shape=shape)
    assert_same(world, batch_of(world, kind, lengths), kind, "exact", served="shadow")


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_pages_on_fa3(kind, page_size, strategy):
    lengths = [1, page_size, page_size + 1, 3 * page_size - 1]
    world = with_requests(
        "fa3", torch.float8_e4m3fn, lengths, page_size=page_size, slots=16 * page_size, context=512
    )
    assert_same(world, batch_of(world, kind, lengths), kind, strategy)


@pytest.mark.parametrize("family", ["flashinfer_mla", "fa3"])
def test_batches_up_to_64_with_lengths_up_to_4096(family):
    lengths = [4096, *[1 + 7 * i % 200 for i in range(63)]]
    shape = Shape(layers=1, heads=1, rank=16, rope=16)
    world = with_requests(family, torch.float8_e4m3fn, lengths, slots=16384, context=4200, shape=shape)
    assert_same(world, batch_of(world, "decode", lengths), "decode", "exact", served="shadow")


@pytest.mark.parametrize(("family", "kind"), SITES)
def test_drawn_batches_with_drawn_lengths(family, kind):
    """Up to 64 requests; contexts from 0, where the one row is the new token's, to 4,095."""
    draw = random.Random(f"{family} {kind}")
    shape = Shape(layers=1, heads=1, rank=16, rope=16)
    sizes, formats = draw.sample((64, draw.randint(2, 63)), k=2), draw.sample(FP8, k=2)
    for size, fp8, strategy in zip(sizes, formats, EXACT, strict=True):
        contexts = [draw.choice((0, 1, draw.randint(2, 60))) for _ in range(size)]
        contexts[draw.randrange(size)] = 4095 if size == 64 else 1023
        lengths = [n + 1 for n in contexts]
        world = with_requests(family, fp8, lengths, slots=sum(lengths) + 64, context=4200, shape=shape)
        if kind == "decode":
            batch = world.batch(ForwardMode.DECODE, lengths)
        else:
            batch = world.batch(ForwardMode.EXTEND, lengths, prefix=contexts)
        assert_same(world, batch, kind, strategy)


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("family", ["flashinfer_mla", "fa3"])
def test_64_requests_on_one_prefix(family, strategy):
    prefix, shape = 48, Shape(layers=2, heads=1, rank=16, rope=16)
    world = World(family, max_bs=64, slots=256, context=64, shape=shape).fill()
    world.allot(0, prefix + 1)
    for request in range(1, 64):
        world.share(request, 0, prefix)
        world.requests.req_to_token[request, prefix : prefix + 1] = world.allot(request, 1).int()
        world.share(request, 0, prefix)
    lengths = [prefix + 1] * 64
    # 3,136 tokens are read from 112 slots.
    assert sum(lengths) > 10 * world.slots
    assert_same(world, batch_of(world, "decode", lengths), "decode", strategy)


@pytest.mark.parametrize("family", ["flashinfer_mla", "fa3"])
def test_an_idle_batch_reaches_no_site(family):
    # DP attention's idle ranks: SGLang answers before it comes to forward_decode, patched or not.
    world = World(family).fill()
    batch = world.batch(ForwardMode.IDLE, [])
    q = torch.zeros(0, world.shape.heads * world.shape.rank, dtype=world.shape.dtype)
    with patch.applied("shadow"):
        out = world.backend.forward(q, None, None, world.layers[0], batch)
        assert out.shape[0] == 0
        assert patch.status()["counters"]["calls"] == {}


def test_unreferenced_slots_tails_and_slot_0_may_hold_nan():
    lengths = [3, 70]
    world = with_requests("fa3", torch.float8_e4m3fn, lengths, page_size=64, slots=640, context=512)
    active = torch.cat([world.requests.req_to_token[r, :n] for r, n in enumerate(lengths)]).long()
    for buffer in world.pool.kv_buffer:
        kept = buffer[active].clone()
        buffer.fill_(0x7F)
        buffer[active] = kept
    want = assert_same(world, batch_of(world, "decode", lengths), "decode", "shadow")
    assert all(t.isfinite().all() for t in want)


# The controls: without them an identity could be that of two computations that read nothing.


@pytest.mark.parametrize(("family", "kind"), SITES)
def test_control_stock_equals_itself_and_active_rows_matter(family, kind):
    lengths = [5, 17]
    world = with_requests(family, torch.float8_e4m3fn, lengths)
    batch = batch_of(world, kind, lengths)
    tensors = world.tensors(batch)

    def stock():
        with world.unpatched():
            return run(world, batch, kind, tensors)[0][0]

    first = stock()
    assert torch.equal(first, stock())
    active = world.requests.req_to_token[1, 2].item()
    every = {i for r, n in enumerate(lengths) for i in world.requests.req_to_token[r, :n].tolist()}
    idle = next(i for i in range(1, world.slots) if i not in every)
    buffer = world.pool.kv_buffer[0]
    kept = buffer[idle].clone()
    buffer[idle] = kept ^ 0x3F
    assert torch.equal(first, stock())
    buffer[active] = buffer[active] ^ 0x3F
    assert not torch.equal(first, stock())


def test_control_a_patch_that_casts_nothing_is_caught(monkeypatch):
    from kvlab.patch import casts

    lengths = [5, 17]
    world = with_requests("flashinfer_mla", torch.float8_e4m3fn, lengths)
    monkeypatch.setattr(casts, "shadow", lambda rows, out, *rest: out.zero_())
    batch = batch_of(world, "decode", lengths)
    tensors = world.tensors(batch)
    with world.unpatched():
        want = run(world, batch, "decode", tensors)[0]
    monkeypatch.setattr("kvlab.patch.selfcheck.check", lambda strategy, facts: None)
    with patch.applied("shadow"):
        got = run(world, batch, "decode", tensors)[0]
    assert not torch.equal(want[0], got[0])
