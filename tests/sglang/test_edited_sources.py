"""The installed release with its casts edited by hand, as distributions do: the same bits, counted."""

import ast
import re
import sys
import types

import pytest
import torch
from rig.world import ForwardMode, World, fa3, flashinfer_mla

from kvlab.patch import casts, hooks, sites
from kvlab.patch.runtime import Runtime

MODULES = {"flashinfer_mla": flashinfer_mla, "fa3": fa3}
STAND_INS = (
    *("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"),
    *("flash_attn_with_kvcache", "merge_state_v2", "merge_state_v2_wrapper"),
)
CAST = re.compile(r"(\w+)\.token_to_kv_pool\.get_key_buffer\(\s*layer\.layer_id\s*\)\.to\(\s*q\.dtype\s*\)")
POOL = r"\1.token_to_kv_pool.get_key_buffer(layer.layer_id)"
LENGTHS = [5, 17, 9]
KINDS = {"decode": (ForwardMode.DECODE, None), "extend": (ForwardMode.EXTEND, [n // 2 for n in LENGTHS])}
IN_BF16 = rf"{POOL}.to(torch.bfloat16)"


class Fork:
    """The family's module with every cast of the pool rewritten, as a module of its own."""

    def __init__(self, family, cast):
        self.family = next(f for f in sites.FAMILIES if f.name == family)
        stock = MODULES[family]
        text = (sites.installed().root / self.family.path).read_text(encoding="utf-8")
        edited, count = CAST.subn(cast, text)
        assert count == 2
        self.module = types.ModuleType(stock.__name__)
        exec(compile(edited, "edited", "exec"), vars(self.module))
        for name in filter(vars(stock).__contains__, STAND_INS):
            setattr(self.module, name, getattr(stock, name))
        tree = ast.parse(edited)
        blank = (
            sites.Site(family, kind, self.family.module, self.family.cls, sites.LEFT_ALONE) for kind in KINDS
        )
        self.sites = [sites.recognise(self.family, site, tree) for site in blank]
        self.world = World(family, max_bs=4).fill()
        self.world.backend.__class__ = getattr(self.module, self.family.cls)
        for request, n in enumerate(LENGTHS):
            self.world.allot(request, n)
        batches = {
            kind: self.world.batch(mode, LENGTHS, prefix=prefix) for kind, (mode, prefix) in KINDS.items()
        }
        self.steps = {kind: (batch, self.world.tensors(batch)) for kind, batch in batches.items()}

    def step(self, kind, runtime=None):
        """One step's output, through the patch where there is a runtime, and the pool as it was before."""
        world, (batch, tensors) = self.world, self.steps[kind]
        pool = [b.clone() for b in world.pool.kv_buffer]
        done = hooks.Replacements()
        if runtime is not None:
            hooks.install(
                runtime, [s for s in self.sites if s.state == sites.RECOGNISED], done, lambda s: None
            )
        try:
            world.plan(batch)
            return world.attend(batch, kind, tensors)
        finally:
            done.undo()
            for buffer, was in zip(world.pool.kv_buffer, pool, strict=True):
                buffer.copy_(was)


@pytest.fixture
def fork(monkeypatch):
    def made(family, cast):
        found = Fork(family, cast)
        monkeypatch.setitem(sys.modules, found.family.module, found.module)
        return found

    return made


def served(fork, kind, strategy):
    """Stock's and the patch's output of one step, and what the patch counted."""
    want = fork.step(kind)
    runtime = Runtime(strategy, is_strict=False, version="edited")
    got = fork.step(kind, runtime)
    assert torch.equal(want.view(torch.int16), got.view(torch.int16))
    counted = runtime.counters.as_dict()
    return counted["calls"].get(f"{fork.family.name}.{kind}", {}), counted["fallbacks"], runtime


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize(
    "cast", ["q", "q.dtype, non_blocking=True", "device=q.device, dtype=q.dtype, copy=False"]
)
def test_a_cast_spelled_otherwise_is_the_same_cast(fork, family, kind, cast):
    calls, fallbacks, _ = served(fork(family, rf"{POOL}.to({cast})"), kind, "gather")
    assert (calls, fallbacks) == ({"gather": 1}, {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODULES)
def test_another_cast_is_stock_s_and_counted(fork, family, kind):
    """What `gather` has swapped by then goes back, and what the method has read of it is read again."""
    calls, fallbacks, _ = served(fork(family, rf"{POOL}.to(q.dtype, copy=True)"), kind, "gather")
    assert calls == {"stock": 1}
    assert fallbacks == {"rows asked for another cast than to BF16 or FP16": 1}


@pytest.mark.parametrize(
    ("cast", "why"),
    [
        (rf"torch.nan_to_num({POOL}.to(q.dtype))", "does more with the wide rows than hand them"),
        (rf"{POOL}.to(q.dtype) * 1", "does more with the wide rows than hand them"),
        (rf"{POOL}.to(q.dtype).contiguous()", "does more with the wide rows than hand them"),
        (rf"{POOL}.float()", "casts no pool"),
        (
            r"(lambda pool: pool.get_key_buffer(layer.layer_id).to(q.dtype))(\1.token_to_kv_pool)",
            "held by 'pool'",
        ),
        (rf"(lambda rows: rows.to(q.dtype))({POOL})", "casts no pool"),
    ],
)
@pytest.mark.parametrize("family", MODULES)
def test_what_is_not_the_code_we_know_is_left_alone(fork, family, cast, why):
    edited = fork(family, cast)
    assert [s.state for s in edited.sites] == [sites.LEFT_ALONE] * 2
    assert all(why in s.reason for s in edited.sites)


def edited_sites(family, old, new):
    """The sites of the installed source with every `old` replaced."""
    found = next(f for f in sites.FAMILIES if f.name == family)
    text = (sites.installed().root / found.path).read_text(encoding="utf-8")
    edited, count = re.subn(old, new, text)
    assert count
    blank = [sites.Site(family, kind, found.module, found.cls, sites.LEFT_ALONE) for kind in KINDS]
    return [sites.recognise(found, site, ast.parse(edited)) for site in blank]


GRAPHS_TOLD = r"def init_forward_metadata_(out_graph|replay_cuda_graph)\("


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (r"def init_forward_metadata\(", "def prepare_metadata(", "has no init_forward_metadata"),
        (GRAPHS_TOLD, r"def prepare_\1(", "has no init_forward_metadata_out_graph or"),
        (
            r"(def init_forward_metadata\(\s*self, )forward_batch",
            r"\1batch",
            "does not begin with (self, for",
        ),
        (GRAPHS_TOLD + r"\s*self,", r"def init_forward_metadata_\1(self, x,", "does not begin with (self, "),
    ],
)
@pytest.mark.parametrize("family", MODULES)
def test_metadata_that_is_told_otherwise_is_left_alone(family, old, new, why):
    """A decision stands until metadata is made anew: where that is not noticed it would outlive its step."""
    for site in edited_sites(family, "forward_decode", "forward_decode"):
        assert site.state == sites.RECOGNISED
    for site in edited_sites(family, old, new):
        assert site.state == sites.LEFT_ALONE
        assert why in site.reason


TWICE = [
    (
        r"(?m)^    def forward_decode\(",
        r"    @torch.compile\n    def forward_decode(",
        "decorated with torch.compile",
    ),
    (r"(?m)^    def forward_decode\(", r"    forward_decode = 1\n    def forward_decode(", "more than once"),
    (
        r"(?m)^    def forward_decode\(",
        r"    if 1: forward_decode = 1\n    def forward_decode(",
        "more than once",
    ),
    (
        r"(?m)^class (Fla\w+Backend)\(AttentionBackend",
        r"class \1: 1\nclass \1(AttentionBackend",
        "more than once",
    ),
]


@pytest.mark.parametrize(("old", "new", "why"), TWICE)
@pytest.mark.parametrize("family", MODULES)
def test_a_method_that_is_not_only_what_stands_there_is_left_alone(family, old, new, why):
    plain = edited_sites(
        family, r"(?m)^    def forward_decode\(", r"    @torch.no_grad()\n    def forward_decode("
    )
    assert plain[0].state == sites.RECOGNISED
    (decode, _) = edited_sites(family, old, new)
    assert decode.state == sites.LEFT_ALONE
    assert why in decode.reason


def kernels(fork):
    """Where the attention library's entry point is looked up."""
    if fork.family.name == "flashinfer_mla":
        return [(fork.module.BatchMLAPagedAttentionWrapper, "run")]
    names = ("flash_attn_with_kvcache", "flash_attn_with_kvcache_fa3")
    return [(o, n) for o in (fork.module, fork.world.backend) for n in names if hasattr(o, n)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODULES)
def test_a_cast_that_fails_leaves_nothing_of_what_was_swapped(fork, family, kind, monkeypatch):
    """FA3's extend has read the page table by then: the method runs again."""

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no room for compact rows")

    edited, runtime = fork(family, IN_BF16), Runtime("gather", is_strict=False, version="edited")
    want = edited.step(kind)
    for is_failing in (False, True):
        if is_failing:
            monkeypatch.setattr(casts, "gather", fail)
        assert torch.equal(edited.step(kind, runtime).view(torch.int16), want.view(torch.int16))
    counted = runtime.counters.as_dict()
    assert counted["calls"][f"{family}.{kind}"] == {"gather": 1, "stock": 1}
    assert counted["fallbacks"] == {"out of memory for scratch": 1}


@pytest.mark.parametrize("family", MODULES)
def test_a_kernel_that_refuses_what_was_swapped_gets_stock_s(fork, family, monkeypatch, caplog):
    """Whatever a newer attention library checks: what `gather` swapped is taken back, the call served."""
    edited = fork(family, IN_BF16)
    slots = edited.world.slots

    def refusing(kernel):
        def run(*args, **kwargs):
            rows = kwargs["k_cache"].flatten(0, 1) if family == "fa3" else args[3]
            if len(rows) < slots:
                raise ValueError("KV cache does not cover the planned page indices")
            return kernel(*args, **kwargs)

        return run

    for target, name in kernels(edited):
        monkeypatch.setattr(target, name, refusing(getattr(target, name)))
    for kind in KINDS:
        calls, fallbacks, runtime = served(edited, kind, "gather")
        assert calls == {"stock": 1}
        assert fallbacks == {"gather failed": 1}
        # And not again, for which `exact` has other ways.
        assert torch.equal(edited.step(kind, runtime).view(torch.int16), edited.step(kind).view(torch.int16))
        assert runtime.counters.as_dict()["calls"][f"{family}.{kind}"] == {"stock": 1, "shadow": 1}
    assert [m for m in caplog.messages if "gather failed (ValueError: KV cache does not cover" in m]


@pytest.mark.parametrize("family", MODULES)
def test_stock_s_own_error_is_nobody_else_s(fork, family, monkeypatch):
    edited = fork(family, IN_BF16)

    def run(*args, **kwargs):
        raise ValueError("out of luck")

    for target, name in kernels(edited):
        monkeypatch.setattr(target, name, run)
    runtime = Runtime("gather", is_strict=False, version="edited")
    for kind in KINDS:
        with pytest.raises(ValueError, match="out of luck"):
            edited.step(kind, runtime)
    assert runtime.counters.as_dict()["fallbacks"] == {}
