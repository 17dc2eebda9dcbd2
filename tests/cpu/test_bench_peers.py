"""Each row of the attention benchmark asks for the same attention: with stand-ins that compute what they are
told to, every row equals the reference."""

import sys
import types

import pytest
import torch

from kvlab.bench import peers
from kvlab.bench.attention import ContextLost, _Bench
from kvlab.kernels.reference import mla_attention

LENGTHS = [70, 3, 64]


def attention(q, keys, scale):
    """[heads, 576] over [n, 576]."""
    k = keys.double()
    return torch.softmax(q.double() @ k.T * scale, dim=-1) @ k[:, : peers.LATENT]


class Wrapper:
    """flashinfer's BatchMLAPagedAttentionWrapper in plain torch."""

    def __init__(self, workspace, backend):
        assert backend in ("fa2", "fa3")
        assert workspace.dtype == torch.int8

    def plan(
        self, qo, kv, indices, lengths, heads, latent, rope, page_size, causal, scale, q_dtype, kv_dtype
    ):
        assert (page_size, causal, latent, rope) == (1, False, 512, 64)
        assert qo.tolist() == list(range(lengths.numel() + 1))
        assert kv.diff().tolist() == lengths.tolist()
        self.kv, self.indices, self.scale, self.kv_dtype, self.heads = (
            kv.tolist(),
            indices,
            scale,
            kv_dtype,
            heads,
        )

    def run(self, q_nope, q_pe, ckv, kpe, out, ckv_scale=None, kpe_scale=None):
        assert ckv.dtype == kpe.dtype == self.kv_dtype
        assert (ckv_scale == kpe_scale == 1.0) is (self.kv_dtype == torch.float8_e4m3fn)
        assert q_nope.shape[1] == self.heads
        rows = torch.cat([ckv.float(), kpe.float()], dim=-1)[:, 0]
        for b in range(q_nope.shape[0]):
            slots = self.indices[self.kv[b] : self.kv[b + 1]].long()
            out[b] = attention(torch.cat([q_nope[b], q_pe[b]], -1), rows[slots], self.scale)


def sglang_decode(q, k, v, o, indptr, indices, logits, lse, splits, most, scale, k_scale, v_scale, has_mla):
    assert splits.tolist() == [1] * q.shape[0]
    assert logits.shape == (*q.shape[:2], most, 512)
    for b in range(q.shape[0]):
        slots = indices[indptr[b] : indptr[b + 1]].long()
        o[b] = attention(q[b], k[:, 0].float()[slots], scale)


class CountSplits:
    def __getitem__(self, grid):
        return lambda splits, *_, **__: splits.fill_(1)


def flash_mla(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits,
    softmax_scale,
    **_,
):
    out = torch.empty(q.shape[0], 1, q.shape[2], head_dim_v, dtype=torch.bfloat16, device=q.device)
    for b, n in enumerate(cache_seqlens.tolist()):
        rows = k_cache[block_table[b].long()].float().flatten(0, 2)[:n]
        out[b, 0] = attention(q[b, 0].float(), rows, softmax_scale)
    return out, None


@pytest.fixture
def libraries(monkeypatch, device):
    def module(name, **names):
        made = types.ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)

    module("flashinfer")
    module("flashinfer.mla", BatchMLAPagedAttentionWrapper=Wrapper)
    triton_ops = "sglang.srt.layers.attention.triton_ops"
    module(f"{triton_ops}.decode_attention", decode_attention_fwd=sglang_decode)
    module(f"{triton_ops}.metadata", get_num_kv_splits_triton=CountSplits())
    module(
        "sgl_kernel.flash_mla",
        flash_mla_with_kvcache=flash_mla,
        get_mla_metadata=lambda lengths, heads, one, is_fp8_kvcache: (None, None),
    )
    if device == "cpu":
        card = types.SimpleNamespace(multi_processor_count=4)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)


def bench_on(device):
    """The benchmark's pools: 8 pages of 64, page 0 NaN bytes."""
    g = torch.Generator().manual_seed(0)
    made = object.__new__(_Bench)
    made.device, made.scratch = torch.device(device), {}
    made.rows = [torch.randn(512, 1, 576, generator=g).to(torch.float8_e4m3fn) for _ in range(2)]
    made.rows = [rows.to(device) for rows in made.rows]
    for rows in made.rows:
        rows.view(torch.uint8)[:64] = 0x7F
    made.wide = [r.to(torch.bfloat16) for r in made.rows]
    made.shadow = torch.zeros_like(made.wide[0])
    return made


@pytest.fixture
def bench(device):
    return bench_on(device)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def test_the_cuda_kernel_s_row_is_absent_where_it_does_not_run():
    with pytest.raises(peers.Absent, match="rows are on cpu"):
        peers.BUILDERS["fused_cuda"](bench_on("cpu").problem(LENGTHS, 4))


@pytest.mark.parametrize("row", [r for r in peers.BUILDERS if r != "fused_cuda"])
def test_every_row_attends_over_the_same_rows(libraries, bench, row):
    p = bench.problem(LENGTHS, 4)
    call = peers.BUILDERS[row](p)
    for layer in (1, 0):
        want, _ = mla_attention(
            p.q_nope, p.q_pe, bench.rows[layer], p.active, sm_scale=p.sm_scale, dtype=torch.float64
        )
        # FlashMLA takes Q in FP8, which costs a few percent.
        assert error(call(layer), want) < (0.08 if row == "flashmla_fp8" else 6e-3)


def test_slots_and_pages_name_the_same_rows_and_none_twice(bench):
    p = bench.problem(LENGTHS, 4)
    slots = p.active.slots()
    assert [s.numel() for s in slots] == LENGTHS
    for row, mine in zip(p.table, slots, strict=True):
        at = torch.arange(mine.numel(), device=mine.device)
        assert torch.equal(mine, row[at // 64].long() * 64 + at % 64)
    every = torch.cat(slots)
    assert every.unique().numel() == every.numel()
    assert every.min() >= 64, "page 0 is padding"


def test_rows_that_cannot_be_measured_say_why(bench, monkeypatch):
    p = bench.problem(LENGTHS, 2)
    want = torch.ones(3, 2, 512, dtype=torch.float64)
    monkeypatch.setattr(bench, "time", lambda call, few: (1.0, 2.0), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fails(_):
        raise ValueError("no kernel\nfor this chip")

    answers = {
        "fine": lambda _: lambda layer: want.bfloat16(),
        "off": lambda _: lambda layer: 2 * want,
        "nan": lambda _: lambda layer: want * float("nan"),
        "broken": fails,
    }
    monkeypatch.setattr(sys.modules["kvlab.bench.attention"], "BUILDERS", answers | {"gone": peers.stock})
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    rows = {name: bench.row(name, p, want) for name in (*answers, "gone")}
    assert (rows["fine"].us, rows["fine"].cold_us, rows["fine"].error) == (1.0, 2.0, 0.0)
    assert rows["fine"].tb_s == pytest.approx(sum(LENGTHS) * 576 / 2.0 / 1e6)
    assert all(rows[n].us is None for n in rows if n != "fine")
    assert rows["off"].note.startswith("wrong: error 1")
    assert rows["nan"].note.startswith("wrong")
    assert rows["broken"].note == "failed: ValueError: no kernel for this chip"
    assert rows["gone"].note.startswith("absent: flashinfer")


def test_a_lost_context_ends_the_run(bench, monkeypatch):
    p = bench.problem(LENGTHS, 2)

    def lost():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(sys.modules["kvlab.bench.attention"], "BUILDERS", {"bad": lambda _: lost()})
    with pytest.raises(ContextLost, match="bad: RuntimeError"):
        bench.row("bad", p, torch.ones(1))
