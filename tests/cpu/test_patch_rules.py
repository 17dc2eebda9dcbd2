"""The patch's arithmetic and rules: policies, counters, scratch, the one-launch KV write."""

import inspect
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.patch import casts, policy, selfcheck
from kvlab.patch.counters import Counters
from kvlab.patch.policy import Facts, choose, parse
from kvlab.patch.scratch import Scratch, clear_unread
from kvlab.patch.seam import DeferredCast, PoolView, put_back
from kvlab.patch.strategies import Shadow

FACTS = Facts(
    kind="decode",
    device=torch.device("cpu"),
    slots=495_616,
    width=576,
    fp8=torch.float8_e4m3fn,
    q_dtype=torch.bfloat16,
    heads=8,
    rank=512,
)
SMALL = Facts(
    kind="decode",
    device=torch.device("cpu"),
    slots=8192,
    width=48,
    fp8=torch.float8_e4m3fn,
    q_dtype=torch.bfloat16,
    heads=2,
    rank=32,
)
EXACT = {"shadow", "gather", "stock"}


@pytest.fixture
def on_kernels(device, monkeypatch):
    """SMALL where the Triton kernels run: on the GPU, or interpreted."""
    monkeypatch.setattr(casts, "INTERPRET", True)
    return replace(SMALL, device=torch.empty(0, device=device).device)


def refusing(*names):
    return lambda strategy, facts: "no" if strategy in names else None


@given(
    asked=st.sampled_from([p for p in policy.CHOICES if p != "off"]),
    kind=st.sampled_from(["decode", "extend"]),
    slots=st.integers(1, 10**7),
    refused=st.sets(st.sampled_from([s for s in policy.STRATEGIES if s != "stock"])),
)
def test_a_choice_is_never_one_that_was_refused_and_depends_on_facts_only(asked, kind, slots, refused):
    facts = replace(FACTS, kind=kind, slots=slots)
    choice = choose(asked, facts, refusing(*refused))
    assert choice.strategy not in refused
    assert choice == choose(asked, facts, refusing(*refused))
    if asked == "exact" or (asked == "fast" and kind == "extend"):
        assert choice.strategy in EXACT
    if asked in ("exact", "fast") and slots <= policy.SMALL_POOL_SLOTS and asked == "exact":
        assert choice.strategy == "stock"


def test_the_policies_at_the_source_text_s_pool():
    assert choose("exact", FACTS, refusing()).strategy == "shadow"
    assert choose("fast", FACTS, refusing()).strategy == "fused"
    assert choose("fast", replace(FACTS, kind="extend"), refusing()).strategy == "shadow"
    fallen = choose("fast", FACTS, refusing("fused"))
    assert (fallen.strategy, fallen.reason) == ("shadow", "not fused: no")
    assert choose("exact", FACTS, refusing("shadow")).strategy == "gather"
    assert choose("exact", FACTS, refusing("shadow", "gather")).strategy == "stock"


def test_the_small_pool_rule_is_the_recorded_break_even():
    # 827.8 us for 495,552 slots and 5.4 us a launch.
    assert policy.SMALL_POOL_SLOTS == 3232
    at = policy.SMALL_POOL_SLOTS
    assert choose("exact", replace(FACTS, slots=at), refusing()).strategy == "stock"
    assert choose("exact", replace(FACTS, slots=at + 1), refusing()).strategy == "shadow"


@pytest.mark.parametrize("name", [None, "", " Exact "])
def test_the_default_is_exact(name):
    assert parse(name) == "exact"


def test_a_mistyped_strategy_says_what_would_be_right():
    with pytest.raises(BadInput, match=r"KVLAB_PATCH: 'exakt' is not a strategy; use one of exact, fast"):
        parse("exakt")


def test_bytes_avoided_are_the_cast_of_the_pool_less_that_of_the_batch():
    def avoided(slots, row_bytes, tokens):
        ran, replayed = Counters(), Counters()
        ran.call("site", "shadow", slots, row_bytes, tokens)
        replayed.call("site", "shadow", slots, row_bytes, tokens, graph="g")
        replayed.replay("g", tokens)
        assert ran.as_dict() == replayed.as_dict()
        return ran.as_dict()["bytes_avoided"]

    # One layer of the source text's pool, 100 tokens: 856.3 MB less 172.8 KB.
    assert avoided(495_552, 576, 100) == 3 * 576 * (495_552 - 100)
    assert avoided(10, 576, 100) == 0
    assert avoided(10, 576, None) == 0


def test_a_captured_pass_counts_at_each_replay_and_not_before():
    c = Counters()
    c.capture("g")
    for _ in range(3):
        c.call("fa3.decode", "shadow", slots=1000, row_bytes=10, tokens=1, graph="g")
    c.fallback("why", graph="g")
    assert c.as_dict() == {"calls": {}, "fallbacks": {}, "bytes_avoided": 0, "kv_writes": {}}
    for tokens in (100, 200):
        c.replay("g", tokens)
    c.replay("another", 1)
    assert c.as_dict()["calls"] == {"fa3.decode": {"shadow": 6}}
    assert c.as_dict()["fallbacks"] == {"why": 2}
    assert c.as_dict()["bytes_avoided"] == 3 * 3 * 10 * (900 + 800)
    # Captured again: what it does is another thing now, what it did stays counted.
    c.capture("g")
    c.replay("g", 1)
    assert c.as_dict()["calls"] == {"fa3.decode": {"shadow": 6}}
    c.call("fa3.decode", "gather", slots=1000, row_bytes=10, tokens=1, graph="g")
    c.replay("g", None)
    c.replay("g", 999)
    assert c.as_dict()["calls"] == {"fa3.decode": {"gather": 2, "shadow": 6}}
    assert c.as_dict()["fallbacks"] == {"why": 2}
    assert c.as_dict()["bytes_avoided"] == 3 * 3 * 10 * (900 + 800) + 3 * 10
    c.clear()
    assert c.as_dict() == {"calls": {}, "fallbacks": {}, "bytes_avoided": 0, "kv_writes": {}}


# The KV write.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_torch_s_write_gives_torch_s_bytes_for_every_value(fp8, dtype):
    assert selfcheck.check_write(replace(SMALL, fp8=fp8, q_dtype=dtype, width=576, rank=512)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_one_launch_write_gives_torch_s_bytes_for_every_value(fp8, dtype, on_kernels):
    assert selfcheck.check_write(replace(on_kernels, fp8=fp8, q_dtype=dtype, width=576, rank=512)) is None


def test_the_write_check_sees_one_wrong_code_of_an_overflow(monkeypatch):
    from kvlab.patch import write

    right = write.quantise

    def other_overflow(buffer, loc, nope, rope, fp8, clear):
        right(buffer, loc, nope, rope, fp8, clear)
        # What another torch writes past the range: NaN where this one saturates, or the reverse.
        is_over = buffer[:, 0, : nope.shape[1]][nope.float().abs() > 500]
        buffer[:, 0, : nope.shape[1]][nope.float().abs() > 500] = is_over ^ 1

    monkeypatch.setattr(write, "quantise", other_overflow)
    assert "bytes differ" in selfcheck.check_write(SMALL)
    monkeypatch.setattr(write, "quantise", lambda *a: right(*a[:5]))
    assert selfcheck.check_write(SMALL) == "slot 0 was not zeroed along"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_write_with_the_cast_passes_its_check(fp8, dtype, on_kernels):
    facts = replace(on_kernels, fp8=fp8, q_dtype=dtype, width=96, rank=64)
    assert selfcheck.check_joint(facts) is None


@pytest.mark.parametrize("is_early", [False, True])
def test_the_check_of_the_write_with_the_cast_sees_a_slot_that_is_cast_while_it_is_written(
    is_early, on_kernels, monkeypatch
):
    # Left on the list, a new slot is cast from what stood there before, or from half of what comes.
    right = casts.write_shadow

    def late(found, out, new, *, early):
        was = new.buffer[new.loc].clone()
        right(found, out, new, early=early)
        if early is is_early:  # the kernels are two
            out[new.loc] = was.view(new.fp8).to(out.dtype)
        return out

    monkeypatch.setattr(casts, "write_shadow", late)
    assert "differ from the stock cast" in selfcheck.check_joint(replace(on_kernels, width=96, rank=64))


class Asked(SimpleNamespace):
    """A call: what it casts to, and what is done where somebody reads the pool."""

    settle = staticmethod(lambda: None)


def test_who_reads_rows_some_other_way_finds_them_written():
    rows, written = torch.ones(4, 1, 2).to(torch.float8_e4m3fn), []
    deferred = DeferredCast(
        rows, Asked(cast=lambda r, dtype: r.to(dtype), settle=lambda: written.append(True))
    )
    deferred.to(torch.bfloat16)
    assert not written
    for n, read in enumerate((lambda: deferred[0], lambda: deferred.shape, lambda: torch.clone(deferred)), 1):
        read()
        assert len(written) >= n


@pytest.mark.parametrize("strategy", ["shadow", "gather"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_self_checks_pass_on_the_kernels(strategy, fp8, page_size, on_kernels):
    assert selfcheck.check(strategy, replace(on_kernels, fp8=fp8, page_size=page_size)) is None


def test_the_fused_check_refuses_nan_and_noise(monkeypatch):
    from kvlab.patch.strategies import fused

    assert selfcheck.check("fused", SMALL) is None
    right = fused.attend
    monkeypatch.setattr(fused, "attend", lambda *a, **k: right(*a, **k) * 1.02)
    assert "relative error 0.02" in selfcheck.check("fused", SMALL)
    monkeypatch.setattr(fused, "attend", lambda *a, **k: right(*a, **k) * torch.nan)
    assert "nan" in selfcheck.check("fused", SMALL)


def test_the_fused_check_asks_for_a_long_request_too(monkeypatch):
    """Short steps and scheduled ones are two ways through the CUDA decode."""
    from kvlab.patch.strategies import fused

    assert max(selfcheck._longest(torch.device("cuda"))) > 128 * 144
    monkeypatch.setattr(selfcheck, "_longest", lambda device: (48, 20_000))
    assert selfcheck.check("fused", SMALL) is None
    right = fused.attend

    def wrong_when_long(q_nope, q_pe, rows, active, **named):
        return right(q_nope, q_pe, rows, active, **named) * (1.02 if active.bounds[-1] > 20_000 else 1)

    monkeypatch.setattr(fused, "attend", wrong_when_long)
    assert "up to 20,000 tokens: relative error 0.02" in selfcheck.check("fused", SMALL)


def test_the_fused_check_asks_the_kernels_of_larger_batches_too(monkeypatch):
    from kvlab.patch.strategies import fused

    right, calls = fused.attend, []

    def wrong_at(batch, factor):
        def attend(q_nope, *rest, **named):
            calls.append(q_nope.shape[0])
            return right(q_nope, *rest, **named) * (factor() if q_nope.shape[0] == batch else 1)

        return attend

    monkeypatch.setattr(fused, "attend", wrong_at(64, lambda: 1.02))
    assert "batch 64, up to 48 tokens: relative error 0.02" in selfcheck.check("fused", SMALL)
    # Near enough, but another answer each time.
    turns = iter((1, 1.003))
    monkeypatch.setattr(fused, "attend", wrong_at(16, lambda: next(turns)))
    assert selfcheck.check("fused", SMALL) == "batch 16, up to 48 tokens: two calls gave two answers"
    assert set(calls) == {2, 16, 64}


# Scratch.


def test_scratch_lasts_or_is_given_back():
    scratch, cpu = Scratch(), torch.device("cpu")
    scratch.rows(cpu, "shared", 10, 8, torch.bfloat16, lasts=False)
    assert scratch.nbytes() == 0
    first = scratch.rows(cpu, "shared", 10, 8, torch.bfloat16, lasts=True)
    assert scratch.nbytes() == 160
    assert first.abs().sum() == 0
    again = scratch.rows(cpu, "shared", 5, 8, torch.bfloat16, lasts=False)
    assert again.data_ptr() == first.data_ptr()
    assert scratch.nbytes() == 160


def test_scratch_that_a_capture_made_is_cleared_by_each_call(monkeypatch):
    """Nothing zeroes it as a whole: what attention may load and mask must be finite all the same."""
    scratch, cpu = Scratch(), torch.device("cpu")
    monkeypatch.setattr("kvlab.patch.scratch.is_capturing", lambda device: True)
    monkeypatch.setattr(torch, "empty", lambda *n, **how: torch.full(n, 0x7F, **how))
    out = scratch.rows(cpu, "shared", 8, 4, torch.bfloat16, lasts=True)
    active = ActiveSlots.paged(
        torch.tensor([[1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), 4
    )
    call = SimpleNamespace(
        **{"scratch": scratch, "lane": "shared", "lasts": True, "is_direct": False, "pending": None},
        **{"reads": SimpleNamespace(tables=[active]), "settle": lambda: None, "kept": {}, "kind": "extend"},
        **{"backend": type("Backend", (), {"forward_metadata": None})(), "generation": 0},
        **{"layer": SimpleNamespace(layer_id=0), "is_capturing": True},
    )
    Shadow().cast(call, torch.zeros((8, 1, 4), dtype=torch.uint8).view(torch.float8_e4m3fn), torch.bfloat16)
    assert (out[0] == 0).all()
    assert (out[4:8] == 0).all()


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_clearing_touches_slot_0_and_tails_of_last_pages_only(lengths, page_size, seed, device):
    pages = -(-40 // page_size)
    order = torch.randperm(pages * len(lengths), generator=torch.Generator().manual_seed(seed)) + 1
    table = order.view(len(lengths), pages).to(torch.int32)
    active = ActiveSlots.paged(table, torch.tensor(lengths, dtype=torch.int32), page_size)
    shape = ((pages * len(lengths) + 1) * page_size, 1, 2)
    tails = {0}
    for row, n in zip(table.tolist(), lengths, strict=True):
        last = -(-n // page_size) * page_size
        tails |= {row[p // page_size] * page_size + p % page_size for p in range(n, last)}
    assert cleared(shape, active, device) == tails


def cleared(shape, active, device):
    """The rows of a wide layer that `clear_unread` zeroes: torch's and the kernel's are the same."""
    found = []
    for interpret, where in ((False, "cpu"), (True, device)):
        shadow = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=where)
        its = replace(active, table=active.table.to(where), bounds=active.bounds.to(where))
        with mock.patch.object(casts, "INTERPRET", interpret):
            clear_unread(shadow, [its])
        found.append(set((shadow == 0).all(2).all(1).nonzero().flatten().tolist()))
        assert int((~shadow.isnan()).sum()) == len(found[-1]) * shape[2]
    assert found[0] == found[1]
    return found[0]


def test_a_page_that_is_none_has_no_tail(device):
    """-1, past the pool, past the table's width, negative and no length; a table without a page."""

    def paged(table, lengths):
        ints = (torch.tensor(v, dtype=torch.int32) for v in (table, lengths))
        return ActiveSlots.paged(*ints, 4)

    table = [[-1, 2], [9, 1], [1, -1], [2, 1], [1, 2], [2, 2]]
    assert cleared((12, 1, 2), paged(table, [1, 2, 3, 99, -5, 0]), device) == {0, 7}
    assert cleared((12, 1, 2), paged([[], []], [1, 1]), device) == {0}


# The seam.


class Pool:
    name = "pool"

    def __init__(self):
        self.rows = torch.ones(4, 1, 2).to(torch.float8_e4m3fn)
        self.dtype = self.rows.dtype

    def get_key_buffer(self, layer_id):
        return self.rows


class Holder:
    def __init__(self):
        self.token_to_kv_pool = Pool()


def test_a_view_is_its_pool_to_everybody_and_gone_after_the_call():
    holder = Holder()
    pool = holder.token_to_kv_pool
    holder.token_to_kv_pool = view = PoolView(pool, Asked(cast=lambda rows, dtype: rows.to(dtype) * 2))
    assert isinstance(view, Pool)
    assert view.name == "pool"
    view.extra = 1
    assert view.get_key_buffer(0).to(torch.bfloat16)[0, 0, 0] == 2
    put_back(holder, pool)
    assert holder.token_to_kv_pool is pool
    assert pool.extra == 1


def test_a_pool_that_was_swapped_meanwhile_stays():
    holder, other = Holder(), Pool()
    pool = holder.token_to_kv_pool
    holder.token_to_kv_pool = PoolView(pool, Asked())
    holder.token_to_kv_pool = other
    put_back(holder, pool)
    assert holder.token_to_kv_pool is other


def test_only_the_cast_to_a_wide_dtype_is_deferred():
    rows = torch.ones(4, 1, 2).to(torch.float8_e4m3fn)
    asked, passed_by = [], []
    call = Asked(
        cast=lambda r, dtype: asked.append(dtype) or r.to(dtype), passed_by=lambda: passed_by.append(True)
    )
    deferred = DeferredCast(rows, call)
    wide = torch.empty(1, dtype=torch.bfloat16)
    # However it is spelled.
    for args, named in (
        ((torch.bfloat16,), {}),
        ((), {"dtype": torch.bfloat16}),
        ((torch.bfloat16,), {"non_blocking": True}),
        ((torch.bfloat16, False, False), {}),
        ((wide,), {}),
        (("cpu", torch.bfloat16), {}),
        ((torch.device("cpu"),), {"dtype": torch.bfloat16, "copy": False}),
    ):
        assert deferred.to(*args, **named).dtype == torch.bfloat16
        assert (asked.pop(), asked, passed_by) == (torch.bfloat16, [], [])
    for args, named, dtype in (
        ((torch.float32,), {}, torch.float32),
        (("cpu",), {}, rows.dtype),
        (("meta", torch.bfloat16), {}, torch.bfloat16),
        ((torch.bfloat16,), {"copy": True}, torch.bfloat16),
        ((torch.bfloat16,), {"memory_format": torch.contiguous_format}, torch.bfloat16),
    ):
        assert deferred.to(*args, **named).dtype == dtype
        assert (asked, passed_by.pop(), passed_by) == ([], True, [])
    assert deferred.shape == rows.shape
    assert len(deferred) == 4
    assert torch.equal(deferred[1].float(), rows[1].float())
    assert torch.equal(
        torch.cat([deferred.view(torch.uint8), deferred.view(torch.uint8)]),
        torch.cat([rows.view(torch.uint8)] * 2),
    )
    assert torch.empty_like(deferred).shape == rows.shape


def test_importing_the_patch_brings_torch_and_nothing_heavier():
    code = (
        "import torch, sys, time; before = set(sys.modules); start = time.process_time(); import kvlab.patch;"
        "print(time.process_time() - start);"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} &"
        " {'triton', 'typer', 'plotly', 'pandas', 'sglang', 'rich', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    # The budget is 50 ms; a loaded machine may not make this red, a heavy import must.
    assert float(seconds) < 0.25


def test_the_write_kernel_compiles_for_every_chip():
    from kvlab.kernels.aot import Spec, report

    pointers = {"out": "*u8", "loc": "*i64", "nope": "*bf16", "rope": "*bf16"}
    strides = dict.fromkeys(("out_stride", "nope_stride", "rope_stride"), "i32")
    codes = {"OVER": 0x7E, "INF": 0x7E, "NAN": 0x7F, "NEGATIVE_NAN": 0xFF}
    spec = Spec(
        name="kv_write",
        kernel="kvlab.kernels.kv_write:kvlab_kv_write",
        signature=pointers | strides,
        constexprs={"NOPE": 512, "ROPE": 64, "BLOCK": 1024, "E5M2": False, **codes},
        divisible=[*pointers, *strides],
    )
    found = report([spec], (80, 89, 90, 100, 120))
    assert [r.exceeds() for r in found] == [[]] * 5
    assert [r.spill_stores for r in found] == [0] * 5


@pytest.mark.parametrize(
    ("value", "is_yes"),
    [(None, False), ("", False), (" 0", False), ("off", False), ("1", True), ("Yes", True)],
)
def test_a_variable_is_yes_or_no(value, is_yes):
    assert policy.is_set("X", value) is is_yes


@pytest.mark.parametrize("value", ["2", "ture", "strict"])
def test_a_variable_that_is_neither_is_refused(value):
    with pytest.raises(BadInput, match=f"X: '{value}' is neither yes nor no"):
        policy.is_set("X", value)


def test_fast_without_nvrtc_says_once_who_decodes(monkeypatch, caplog):
    """The CUDA kernels need it; without, Triton's serve, which round otherwise."""
    from kvlab.kernels import nvrtc
    from kvlab.patch.runtime import Runtime

    monkeypatch.setattr(selfcheck, "check", lambda strategy, facts: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("kvlab.patch.trust.is_capturing", lambda device: False)
    on_h200 = replace(FACTS, device=torch.device("cuda:0"))

    def chosen(facts):
        runtime = Runtime("fast", is_strict=False, version="x")
        caplog.clear()
        # Twice: another pool of the same shape asks again.
        return {
            choose("fast", f, runtime.trust.refusal).strategy for f in (facts, replace(facts, slots=9999))
        }

    monkeypatch.setattr(nvrtc, "library", lambda: None)
    assert chosen(on_h200) == {"fused"}
    assert caplog.messages == []

    def missing():
        raise nvrtc.CompileError("no libnvrtc: install nvidia-cuda-nvrtc (nothing found)")

    monkeypatch.setattr(nvrtc, "library", missing)
    assert chosen(on_h200) == {"fused"}
    assert caplog.messages == [
        "kvlab: fused on cuda:0: Triton's kernels decode, the CUDA kernels for this chip do not compile: "
        "no libnvrtc: install nvidia-cuda-nvrtc (nothing found)"
    ]
    assert caplog.records[0].levelname == "WARNING"
    # Where Triton's are the only ones, there is nothing to say.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert chosen(on_h200) == {"fused"}
    assert caplog.messages == []


def test_the_parameters_that_a_class_must_have_are_those_that_are_read():
    """Arguments reach what follows a metadata hook by these names and places."""
    from kvlab.patch import hooks, metadata_hooks

    after = hooks._after(None, "fa3")
    assert after.keys() == metadata_hooks.PARAMETERS.keys()
    for name, call in after.items():
        read = [
            p.name for p in inspect.signature(call).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        assert tuple(read) == metadata_hooks.PARAMETERS[name]


# The plan of a replay.


def test_a_verify_s_lengths_stay_fresh_for_graphs_that_outlive_the_patch():
    from kvlab.patch import hooks, plan_hooks
    from kvlab.patch.runtime import Runtime

    class Wrapper:
        def __init__(self):
            self._kv_indptr_buf = torch.zeros(2, dtype=torch.int32)
            self._qo_indptr_buf = torch.zeros(2, dtype=torch.int32)

    def plan(wrapper, qo, kv, *rest, causal=False):
        wrapper.planned = kv.tolist()

    lengths = [torch.tensor([0, n], dtype=torch.int32) for n in (3, 5)]
    for captures in (True, False):
        module = ModuleType("backend")
        module.fast_mla_decode_plan = plan
        runtime, done, wrapper = (
            Runtime("exact", is_strict=False, version="x"),
            hooks.Replacements(),
            Wrapper(),
        )
        plan_hooks.patch_plans(runtime, module, done)
        module.fast_mla_decode_plan(wrapper, lengths[0], lengths[0], causal=True)
        assert wrapper._kv_indptr_buf.tolist() == [0, 3]
        runtime.has_captured = captures
        runtime.is_active = False
        done.undo()
        module.fast_mla_decode_plan(wrapper, lengths[1], lengths[1], causal=True)
        assert wrapper.planned == [0, 5]
        assert wrapper._kv_indptr_buf.tolist() == ([0, 5] if captures else [0, 3])
        assert (module.fast_mla_decode_plan is plan) is not captures
    # What somebody else put on top stays theirs, and calls ours, once.
    plan_hooks.patch_plans(runtime, module, done)
    runtime.has_captured = True
    ours = module.fast_mla_decode_plan
    module.fast_mla_decode_plan = theirs = lambda *args, **named: ours(*args, **named)
    module.fast_mla_decode_plan(wrapper, lengths[0], lengths[0], causal=True)
    done.undo()
    assert module.fast_mla_decode_plan is theirs
    module.fast_mla_decode_plan(wrapper, lengths[1], lengths[1], causal=True)
    assert wrapper._kv_indptr_buf.tolist() == [0, 5]


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_replay_s_plan_waits_for_the_copy_of_the_one_before_it(is_copied, monkeypatch):
    from kvlab.patch import plan_hooks

    did = []

    class Event:
        def record(self, stream):
            assert stream == "current"
            did.append(("queued", id(self)))

        def query(self):
            did.append(("asked", id(self)))
            return is_copied

        def synchronize(self):
            did.append(("copied", id(self)))

    class Wrapper:
        device = torch.device("cuda")

    def refuses(index):
        raise RuntimeError("invalid argument to getCurrentStream")

    # A CUDA build of torch, asked for a device without an index.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", refuses, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(plan_hooks, "is_capturing", lambda device: False)
    plan = plan_hooks._in_turn(lambda wrapper, *rest: did.append(("planned", rest)))
    one, other = Wrapper(), Wrapper()
    for wrapper in (one, other, one):
        plan(wrapper, 1)
    assert [what for what, _ in did] == [
        "planned",
        "queued",
        "planned",
        "queued",
        "asked",
        *([] if is_copied else ["copied"]),
        "planned",
        "queued",
    ]
    # Each wrapper has pinned memory of its own: it waits for its own last copy.
    assert did[4][1] == did[1][1] == did[-1][1] != did[3][1]
    did.clear()
    one.device = torch.device("cpu")
    plan(one, 1)
    assert did == [("planned", (1,))]
