"""What another plugin has put in the place of SGLang's own methods, before us or after: seen and said."""

import functools
import logging

import pytest
import torch
from rig.world import ForwardMode, World, fa3, memory_pool

from kvlab import patch

LENGTHS = [5, 17, 9]
CLASS = fa3.FlashAttentionBackend


def replaced(original, hook):
    """As SGLang's HookRegistry replaces a function: it says that it wraps, and never calls."""

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return hook(*args, **kwargs)

    return wrapper


def around(original):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    return wrapper


def site(kind="decode"):
    return next(s for s in patch.status()["sites"] if s["site"] == f"fa3.{kind}")


def lines(caplog):
    return [
        r.getMessage() for r in caplog.records if r.name == "kvlab.patch" and r.levelno >= logging.WARNING
    ]


def step(world):
    batch = world.batch(ForwardMode.DECODE, LENGTHS)
    world.plan(batch)
    return world.attend(batch, "decode", world.tensors(batch))


def a_world():
    world = World("fa3", max_bs=4, slots=8192).fill()
    for request, n in enumerate(LENGTHS):
        world.allot(request, n)
    return world


def test_another_method_in_sglang_s_place_is_not_the_code_that_was_read(monkeypatch, caplog):
    hook = lambda self, q, *args, **kwargs: q  # noqa: E731
    monkeypatch.setattr(CLASS, "forward_decode", replaced(CLASS.forward_decode, hook))
    theirs = vars(CLASS)["forward_decode"]
    with patch.applied("exact"):
        assert vars(CLASS)["forward_decode"] is theirs
        assert (site()["state"], site("extend")["state"]) == ("left alone", "patched")
        assert "which does not call SGLang's own" in site()["reason"]
        assert len(lines(caplog)) == 1
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    with pytest.raises(SystemExit, match="does not call"):
        patch.apply("exact")
    assert vars(CLASS)["forward_decode"] is theirs
    patch.remove()


def test_a_wrapper_that_calls_sglang_s_own_is_patched_like_it(monkeypatch):
    monkeypatch.setattr(CLASS, "forward_decode", around(CLASS.forward_decode))
    world = a_world()
    with patch.applied("shadow"):
        assert site()["state"] == "patched"
        step(world)
        assert patch.status()["counters"]["calls"] == {"fa3.decode": {"shadow": 1}}


@pytest.mark.parametrize("how", ["put back", "replaced"])
def test_a_seam_that_somebody_else_took_out_is_told(how, monkeypatch, caplog):
    original = CLASS.forward_decode
    # What it puts back at the end is what was there at its first call.
    monkeypatch.setattr(CLASS, "forward_decode", original)
    with patch.applied("exact"):
        ours = CLASS.forward_decode
        monkeypatch.setattr(CLASS, "forward_decode", around(ours))
        a_world()
        assert (site()["state"], lines(caplog)) == ("patched", [])
        other = original if how == "put back" else replaced(ours, lambda self, q, *args, **kwargs: q)
        monkeypatch.setattr(CLASS, "forward_decode", other)
        assert site()["state"] == "left alone"
        assert "does not call the patch" in site()["reason"]
        a_world()
        (line,) = lines(caplog)
        assert "decode left to stock: forward_decode has been replaced by" in line
        assert patch.status()["chosen"]["fa3.decode"]["strategy"] == "stock"
        monkeypatch.setattr(CLASS, "forward_decode", ours)
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    with patch.applied("exact"):
        monkeypatch.setattr(CLASS, "forward_decode", original)
        with pytest.raises(SystemExit, match="does not call the patch"):
            a_world()


@pytest.mark.parametrize("where", ["class", "pool"])
def test_a_hook_on_the_kv_write_sees_every_write(where, monkeypatch):
    world, seen = a_world(), []
    real = memory_pool.MLATokenToKVPool.set_mla_kv_buffer

    def theirs(*args, **kwargs):
        seen.append(len(args))
        return real(*args, **kwargs)

    if where == "class":
        monkeypatch.setattr(memory_pool.MLATokenToKVPool, "set_mla_kv_buffer", functools.wraps(real)(theirs))
    else:
        monkeypatch.setattr(
            world.pool, "set_mla_kv_buffer", functools.partial(theirs, world.pool), raising=False
        )
    with patch.applied("exact"):
        batch = world.batch(ForwardMode.DECODE, LENGTHS)
        world.plan(batch)
        world.attend(batch, "decode", world.tensors(batch))
        assert (patch.status()["counters"]["kv_writes"], len(seen)) == ({"stock": 1}, 1)


@pytest.mark.parametrize("where", ["class", "pool"])
@pytest.mark.parametrize("strategy", ["shadow", "gather"])
def test_rows_that_a_pool_hands_out_as_a_copy_hold_the_new_ones(strategy, where, monkeypatch):
    """The copy is made before a write that waits for its cast."""
    world = a_world()
    batch = world.batch(ForwardMode.DECODE, LENGTHS)
    world.plan(batch)
    tensors = world.tensors(batch)
    before = [b.clone() for b in world.pool.kv_buffer]
    want = world.attend(batch, "decode", tensors)
    real = memory_pool.MLATokenToKVPool.get_key_buffer
    for buffer, was in zip(world.pool.kv_buffer, before, strict=True):
        buffer.copy_(was)
    if where == "class":
        monkeypatch.setattr(
            memory_pool.MLATokenToKVPool, "get_key_buffer", lambda its, layer: real(its, layer).clone()
        )
    else:
        monkeypatch.setattr(
            world.pool, "get_key_buffer", lambda layer: real(world.pool, layer).clone(), raising=False
        )
    with patch.applied(strategy):
        assert torch.equal(world.attend(batch, "decode", tensors), want)
        assert patch.status()["counters"]["calls"] == {"fa3.decode": {strategy: 1}}


def test_a_wrapper_beneath_ours_is_not_taken_over(monkeypatch):
    """Its hook is to see, and may change, what the call returns."""
    original, seen = CLASS.forward_decode, []

    @functools.wraps(original)
    def theirs(*args, **kwargs):
        seen.append(original(*args, **kwargs) * 2)
        return seen[-1]

    monkeypatch.setattr(CLASS, "forward_decode", theirs)
    world = a_world()
    want = step(world)
    with patch.applied("fast"):
        got = step(world)
        assert patch.status()["counters"]["calls"] == {"fa3.decode": {"shadow": 1}}
        assert "lies around SGLang's method" in patch.status()["chosen"]["fa3.decode"]["reason"]
    assert got is seen[-1]
    assert got.shape == want.shape


@pytest.mark.parametrize("strategy", ["exact", "fast"])
def test_a_pool_that_no_view_can_stand_for_is_stock_s(strategy, caplog):
    world = a_world()
    holder = world.backend if hasattr(world.backend, "token_to_kv_pool") else None
    if holder is None:
        pytest.skip("through 0.5.12 the batch holds the pool")
    batch = world.batch(ForwardMode.DECODE, LENGTHS)
    world.plan(batch)
    tensors = world.tensors(batch)
    want = world.attend(batch, "decode", tensors)
    fork = type(CLASS.__name__, (type(holder),), {"token_to_kv_pool": property(lambda its: world.pool)})
    holder.__class__ = fork
    with patch.applied(strategy):
        assert torch.equal(world.attend(batch, "decode", tensors), want)
        assert patch.status()["counters"]["calls"] == {"fa3.decode": {"stock": 1}}
        assert patch.status()["counters"]["fallbacks"] == {"the pool cannot be seen through a view": 1}
    assert len(lines(caplog)) == 1


def test_a_class_in_sglang_s_place_without_its_method(monkeypatch, caplog):
    monkeypatch.setattr(fa3, CLASS.__name__, type("Other", (CLASS,), {}))
    with patch.applied("exact"):
        assert (site()["state"], site("extend")["state"]) == ("left alone", "left alone")
    assert len(lines(caplog)) == 2
