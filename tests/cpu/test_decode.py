"""`mla_decode` against the float64 reference: lengths, pages, queries and bytes of every kind."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.errors import BadInput
from kvlab.kernels import decode, decode_backend
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.decode import (
    LEAST_CAP,
    MOST_CAP,
    Tuning,
    mla_decode,
    workspace_bytes,
    workspace_for,
)
from kvlab.kernels.decode_cut import tuning
from kvlab.kernels.reference import mla_attention

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAGE_SIZES = (0, 1, 3, 16, 64, 128)  # 0: token-level
# Rounding the output alone is 2^-9 of a value at most, which a short row may meet in all of its values. The
# interpreter truncates to BF16 where a GPU rounds, which doubles that.
BOUND = {torch.float16: 1e-3, torch.bfloat16: 3e-3 if torch.cuda.is_available() else 6e-3}
PROPERTY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def make_active(lengths, page_size, slots, generator, *, holes=False, long_indices=False):
    """Random slots or pages, duplicates likely, -1 entries with `holes`, a stale tail nobody may read."""
    if page_size:
        pages = [-(-n // page_size) for n in lengths]
        table = torch.full((len(lengths), max(pages, default=0) + 2), 2**30, dtype=torch.int32)
        for row, n in zip(table, pages, strict=True):
            row[:n] = torch.randint(1, slots // page_size, (n,), generator=generator)
            if holes and n > 1:
                row[n // 2] = -1
        return table, torch.tensor(lengths, dtype=torch.int32)
    table = torch.full((sum(lengths) + 7,), -(2**30), dtype=torch.int64 if long_indices else torch.int32)
    table[: sum(lengths)] = torch.randint(1, slots, (sum(lengths),), generator=generator)
    if holes and sum(lengths) > 3:
        table[sum(lengths) // 2] = -1
        table[0] = slots + 3
    bounds = torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int32).cumsum(0).tolist()], dtype=torch.int32
    )
    return table, bounds


def make_problem(
    device,
    lengths,
    *,
    heads=3,
    rank=32,
    rope=16,
    page_size=0,
    fp8=E4M3,
    q_dtype=torch.float16,
    q_counts=None,
    holes=False,
    long_indices=False,
    stride=0,
    seed=0,
):
    """(q_nope, q_pe, rows, active, q_indptr); rows that no request reads are NaN bytes, slot 0 too."""
    g = torch.Generator().manual_seed(seed)
    size = max(page_size, 1)
    slots = 20 * size if page_size else 90
    width = rank + rope
    table, bounds = make_active(lengths, page_size, slots, g, holes=holes, long_indices=long_indices)
    active = ActiveSlots.paged(table, bounds, page_size) if page_size else ActiveSlots.ragged(table, bounds)
    arena = torch.randint(0, 2, (slots, width + stride), generator=g, dtype=torch.uint8) * 0x80 + 0x7F
    used = active.distinct(slots)
    arena[used, :width] = torch.randn(used.numel(), width, generator=g).to(fp8).view(torch.uint8)
    rows = arena.to(device)[:, :width].view(fp8)
    table, bounds = table.to(device), bounds.to(device)
    active = ActiveSlots.paged(table, bounds, page_size) if page_size else ActiveSlots.ragged(table, bounds)
    q_indptr, tokens = None, len(lengths)
    if q_counts is not None:
        tokens = sum(q_counts) + 1  # one padded query token
        ends = torch.tensor(q_counts, dtype=torch.int32).cumsum(0).tolist()
        q_indptr = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    q_nope = torch.randn(tokens, heads, rank, generator=g).to(device, q_dtype)
    q_pe = torch.randn(tokens, heads, rope, generator=g).to(device, q_dtype) if rope else None
    return q_nope, q_pe, rows, active, q_indptr


def check(q_nope, q_pe, rows, active, q_indptr=None, *, tune=None, bound=None, **options):
    """Equal to the reference, LSE too; returns the output."""
    options = {"sm_scale": 0.1, "q_indptr": q_indptr} | options
    out, lse = mla_decode(q_nope, q_pe, rows, active, return_lse=True, tune=tune, backend="triton", **options)
    want, want_lse = mla_attention(q_nope, q_pe, rows, active, dtype=torch.float64, **options)
    assert torch.isfinite(out).all()
    error = (out.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error < (bound or BOUND[q_nope.dtype])
    empty = want_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert not out[empty].any()
    torch.testing.assert_close(lse[~empty].double(), want_lse[~empty], rtol=1e-5, atol=2e-5)
    return out


@PROPERTY
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    page_size=st.sampled_from(PAGE_SIZES),
    heads=st.sampled_from([1, 3, 8, 16, 17]),
    rank=st.sampled_from([32, 64, 96]),
    rope=st.sampled_from([0, 16, 64]),
    fp8=st.sampled_from([E4M3, E5M2]),
    q_dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    holes=st.booleans(),
    long_indices=st.booleans(),
    stride=st.sampled_from([0, 16, 22]),
    shares=st.integers(1, 4),
    min_tiles=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equals_the_reference(
    device,
    lengths,
    page_size,
    heads,
    rank,
    rope,
    fp8,
    q_dtype,
    holes,
    long_indices,
    stride,
    shares,
    min_tiles,
    seed,
):
    problem = make_problem(
        device,
        lengths,
        heads=heads,
        rank=rank,
        rope=rope,
        page_size=page_size,
        fp8=fp8,
        q_dtype=q_dtype,
        holes=holes,
        long_indices=long_indices and not page_size,
        stride=stride,
        seed=seed,
    )
    check(*problem, tune=cut(shares=shares, min_tiles=min_tiles))


@PROPERTY
@given(
    requests=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=3),
    heads=st.sampled_from([1, 3, 8, 20]),
    page_size=st.sampled_from([0, 3, 16]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_several_query_tokens_a_request(device, requests, heads, page_size, causal, seed):
    lengths, counts = [n for n, _ in requests], [q for _, q in requests]
    problem = make_problem(device, lengths, heads=heads, page_size=page_size, q_counts=counts, seed=seed)
    out = check(*problem, tune=cut(), causal=causal)
    assert not out[sum(counts) :].any(), "a padded query token belongs to no request: zeros"


def cut(*, shares=2, min_tiles=1) -> Tuning | None:
    """The interpreter's cut with few programs; on a GPU the chip's own."""
    if torch.cuda.is_available():
        return None
    return Tuning(16, 16, 4, 1, shares, min_tiles, "plain")


@pytest.mark.parametrize(("heads", "q_counts"), [(64, None), (128, [2, 0, 1])])
def test_many_heads(device, heads, q_counts):
    check(*make_problem(device, [17, 0, 40], heads=heads, q_counts=q_counts), tune=cut())


def test_wildly_unequal_lengths(device):
    problem = make_problem(device, [700, 1, 0, 5, 1, 16], heads=8)
    check(*problem)


@pytest.mark.parametrize("logit_cap", [0.5, 30.0])
@pytest.mark.parametrize("k_scale", [0.25, 3.0])
def test_logit_cap_and_k_scale(device, logit_cap, k_scale):
    check(*make_problem(device, [40, 3], heads=2), logit_cap=logit_cap, k_scale=k_scale)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("logit_cap", [-1.0, LEAST_CAP, MOST_CAP])
def test_a_cap_at_either_end_of_its_range(device, logit_cap):
    """Past it float32 would lose the logits without a word; one that is negative is none."""
    problem = make_problem(device, [40], heads=2)[:4]
    out, _ = mla_decode(*problem, sm_scale=0.3, logit_cap=logit_cap, backend="triton", tune=cut())
    want, _ = mla_attention(*problem, sm_scale=0.3, logit_cap=logit_cap, dtype=torch.float64)
    assert (out.double() - want).norm() / want.norm() < BOUND[torch.float16]


def test_full_width_in_bf16(device):
    problem = make_problem(device, [37, 80], heads=8, rank=512, rope=64, q_dtype=torch.bfloat16)
    check(*problem, sm_scale=576**-0.5)


def test_lse_in_base_2_is_the_natural_one_over_ln_2(device):
    q_nope, q_pe, rows, active, _ = make_problem(device, [30, 0])
    found = [
        mla_decode(q_nope, q_pe, rows, active, sm_scale=0.1, return_lse=True, lse_base2=b, backend="triton")[
            1
        ]
        for b in (False, True)
    ]
    torch.testing.assert_close(found[0], found[1] * math.log(2), rtol=1e-6, atol=1e-6)


def test_lse_is_none_unless_asked_for(device):
    q_nope, q_pe, rows, active, _ = make_problem(device, [5])
    assert mla_decode(q_nope, q_pe, rows, active, sm_scale=0.1)[1] is None


def test_the_same_bits_each_time_in_a_used_workspace(device):
    q_nope, q_pe, rows, active, _ = make_problem(device, [90, 4, 0, 33], heads=8)
    workspace = workspace_for(4, 8, q_nope.device, kv_lora_rank=32)
    assert workspace.numel() == workspace_bytes(4, 8, q_nope.device, kv_lora_rank=32)
    runs = []
    for poison in (0x00, 0xFF):
        # The head of a workspace is the CUDA kernels' own.
        workspace[8192:] = poison
        out = torch.full_like(q_nope, float("nan"))
        mla_decode(q_nope, q_pe, rows, active, sm_scale=0.1, out=out, workspace=workspace, backend="triton")
        runs.append(out)
    assert torch.equal(*runs)


def test_out_and_query_strides_are_free(device):
    q_nope, q_pe, rows, active, _ = make_problem(device, [30, 12], heads=4)
    want, _ = mla_decode(q_nope, q_pe, rows, active, sm_scale=0.1, backend="triton")
    wide = torch.zeros(2, 4, 32 + 16 + 8, dtype=q_nope.dtype, device=device)
    wide[..., :32], wide[..., 32:48] = q_nope, q_pe
    out = torch.full((4, 2, 40), 7.0, dtype=q_nope.dtype, device=device).transpose(0, 1)
    mla_decode(
        wide[..., :32], wide[..., 32:48], rows, active, sm_scale=0.1, out=out[..., :32], backend="triton"
    )
    assert torch.equal(out[..., :32], want)
    assert (out[..., 32:] == 7).all()


@pytest.mark.parametrize("magnitude", [1e-36, 1e-6, 1e4, 1e30])
def test_any_magnitude_of_queries_bf16_holds(device, magnitude):
    q_nope, q_pe, rows, _, _ = make_problem(device, [40], heads=4, q_dtype=torch.bfloat16)
    # Distinct slots: with logits this far apart, equal rows would be a coin toss.
    active = distinct_slots(rows, 40, device)
    check(q_nope * magnitude, q_pe * magnitude, rows, active)


def distinct_slots(rows, n, device):
    """A request of n distinct slots whose rows are random, whatever they were."""
    g = torch.Generator().manual_seed(3)
    fresh = torch.randn(rows.shape, generator=g).to(rows.dtype).view(torch.uint8).to(device)
    rows.view(torch.uint8).copy_(fresh)
    table = torch.randperm(rows.shape[0], generator=g)[:n].int().to(device)
    return ActiveSlots.ragged(table, torch.tensor([0, n], dtype=torch.int32, device=device))


@pytest.mark.parametrize("q_counts", [None, [3]])
def test_a_huge_query_value_that_meets_zeros_hides_no_other(device, q_counts):
    """FP16 cannot hold 2^100 and 1 under one scale; the other values alone decide the logits here."""
    q_nope, q_pe, rows, _, q_indptr = make_problem(
        device, [40], heads=4, q_dtype=torch.bfloat16, q_counts=q_counts
    )
    active = distinct_slots(rows, 40, device)
    rows.view(torch.uint8)[:, 7] = 0
    q_nope[0, 1:3, 7] = 2.0**100
    check(q_nope, q_pe, rows, active, q_indptr)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize(("fp8", "code"), [(E4M3, 0x7F), (E4M3, 0xFF), (E5M2, 0x7D), (E5M2, 0xFE)])
@pytest.mark.parametrize("column", [5, 40])
def test_nan_in_an_active_row_reaches_its_request_and_no_other(device, fp8, code, column):
    q_nope, q_pe, rows, active, _ = make_problem(device, [30, 30], heads=4, fp8=fp8)
    slots = active.slots()
    only_first = next(int(s) for s in slots[0] if s not in slots[1])
    rows.view(torch.uint8)[only_first, column] = code
    out, lse = mla_decode(q_nope, q_pe, rows, active, sm_scale=0.1, return_lse=True, backend="triton")
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert torch.isfinite(out[1]).all()


@pytest.mark.parametrize(("page_size", "long_indices"), [(0, False), (0, True), (1, False), (16, False)])
def test_negative_entries_and_those_past_the_pool_are_masked(device, page_size, long_indices):
    problem = make_problem(
        device, [20, 50], page_size=page_size, holes=True, long_indices=long_indices, q_dtype=torch.float16
    )
    assert (problem[3].table < 0).any()
    check(*problem, tune=cut())


@pytest.mark.parametrize("slots", [3_800_000, 15_200_000])
def test_slots_where_32_bit_offsets_end(device, slots):
    """Bytes of 576-byte rows: slot 3,728,270; the pairs that the kernel counts, unsigned: slot 14.9 M."""
    n = 20
    try:
        # Memory that is never touched costs nothing.
        arena = torch.empty(slots, 576, dtype=torch.uint8, device=device)
    except RuntimeError:
        pytest.skip(f"this machine does not promise {slots * 576 / 1e9:.1f} GB")
    table = torch.arange(slots - 2 * n, slots, 2, dtype=torch.int32, device=device)
    g = torch.Generator().manual_seed(1)
    arena[table.long()] = torch.randn(n, 576, generator=g).to(E4M3).view(torch.uint8).to(device)
    active = ActiveSlots.ragged(table, torch.tensor([0, n], dtype=torch.int32, device=device))
    q_nope = torch.randn(1, 2, 512, generator=g).half().to(device)
    q_pe = torch.randn(1, 2, 64, generator=g).half().to(device)
    check(q_nope, q_pe, arena.view(E4M3), active)


def test_no_requests_or_no_tokens(device):
    rows = torch.zeros(4, 48, dtype=torch.uint8, device=device).view(E4M3)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    active = ActiveSlots.ragged(torch.empty(0, dtype=torch.int32, device=device), one)
    q = torch.empty(0, 2, 32, dtype=torch.float16, device=device)
    pe = torch.empty(0, 2, 16, dtype=torch.float16, device=device)
    out, lse = mla_decode(q, pe, rows, active, sm_scale=1.0, return_lse=True)
    assert out.shape == (0, 2, 32)
    assert lse.shape == (0, 2)
    q, pe = torch.ones(3, 2, 32).half().to(device), torch.ones(3, 2, 16).half().to(device)
    out, lse = mla_decode(q, pe, rows, active, sm_scale=1.0, return_lse=True, q_indptr=one)
    assert not out.any()
    assert lse.isneginf().all()


def test_a_pool_of_no_slots_and_tables_of_no_entries(device):
    """All that a table can name is past the pool, or there is nothing to name: zeros, LSE -inf."""
    q, pe = torch.ones(2, 2, 32).half().to(device), torch.ones(2, 2, 16).half().to(device)
    rows = torch.full((4, 48), 0x7F, dtype=torch.uint8, device=device).view(E4M3)
    i32 = {"dtype": torch.int32, "device": device}
    some = torch.tensor([0, 2, 4], **i32)
    for pool, active in (
        (rows[:0], ActiveSlots.ragged(torch.zeros(4, **i32), some)),
        (rows[:0], ActiveSlots.paged(torch.zeros(2, 1, **i32), some[1:], 4)),
        (rows, ActiveSlots.ragged(torch.zeros(0, **i32), some)),
        (rows, ActiveSlots.paged(torch.zeros(2, 0, **i32), some[1:], 4)),
        (rows, ActiveSlots.ragged(torch.zeros(4, **i32), torch.zeros(3, **i32))),
    ):
        for attend in (mla_decode, mla_attention):
            asked = {"return_lse": True, "backend": "triton"} if attend is mla_decode else {}
            out, lse = attend(q, pe, pool, active, sm_scale=1.0, **asked)
            assert not out.any()
            assert lse.isneginf().all()


def test_scratch_is_asked_for_by_a_device_or_its_name(device):
    assert workspace_for(4, 8, device).numel() == workspace_bytes(4, 8, torch.device(device))
    for arguments, named in (
        ((4, 8, "abacus"), "device"),
        ((-1, 8, device), "tokens"),
        ((4, -8, device), "heads"),
    ):
        with pytest.raises(BadInput, match=f"^{named}: expected"):
            workspace_for(*arguments)


def bad(**changes):
    def apply(arguments):
        return arguments | {k: f(arguments[k]) for k, f in changes.items()}

    return apply


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (bad(rows=lambda r: r.view(torch.uint8)), ["rows", "float8_e4m3fn"]),
        (bad(rows=lambda r: r[:, :40]), ["rows", "[slots, 48]"]),
        (bad(rows=lambda r: r.view(torch.uint8).t().contiguous().t().view(E4M3)), ["rows"]),
        (bad(q_nope=lambda q: q.float()), ["q_nope", "bfloat16 or float16"]),
        (bad(q_nope=lambda q: q[0]), ["q_nope", "[tokens, heads, kv_lora_rank]"]),
        (bad(q_nope=lambda q: q[:1], q_pe=lambda q: q[:1]), ["q_nope", "one token a request, 2"]),
        (bad(q_pe=lambda q: q.bfloat16()), ["q_pe", "float16"]),
        (bad(q_pe=lambda q: q[:, :1]), ["q_pe", "[2, 3, qk_rope_head_dim]"]),
        (bad(q_indptr=lambda _: torch.zeros(2, dtype=torch.int32)), ["q_indptr", "[3]"]),
        (bad(q_indptr=lambda _: torch.zeros(3)), ["q_indptr", "int32"]),
        (bad(out=lambda _: torch.zeros(2, 3, 30).half()), ["out", "[2, 3, 32]"]),
        (bad(lse=lambda _: torch.zeros(2, 3).half()), ["lse", "float32"]),
        (bad(active=lambda a: a.table), ["active", "ActiveSlots"]),
        (bad(workspace=lambda _: torch.zeros(8, dtype=torch.uint8)), ["workspace", "at least"]),
        (bad(backend=lambda _: "cutlass"), ["backend", "auto, triton, cuda"]),
        (bad(workspace=lambda _: torch.zeros(2**20, dtype=torch.uint8)[4:]), ["workspace", "16 bytes"]),
        (bad(out=lambda _: torch.zeros(1, 3, 32).half().expand(2, 3, 32)), ["out", "overlap", "(0, 32, 1)"]),
        (bad(out=lambda _: torch.zeros(200).half().as_strided((2, 3, 32), (40, 20, 1))), ["out", "overlap"]),
        (lambda given: given | {"out": given["q_nope"]}, ["out", "memory of its own"]),
        (
            bad(q_nope=lambda q: q.repeat(1, 43, 1), q_pe=lambda q: q.repeat(1, 43, 1)),
            ["q_nope", "1 to 128 heads"],
        ),
        (bad(q_nope=lambda q: q[..., :16]), ["q_nope", "even kv_lora_rank of 32 to 512"]),
        (bad(q_pe=lambda q: q.repeat(1, 1, 5)), ["q_pe", "at most 64"]),
        *(
            ({argument: value}, [argument, "finite number"])
            for argument in ("sm_scale", "k_scale", "logit_cap")
            for value in (None, "1", torch.tensor(0.5), math.nan, math.inf, 1e300)
        ),
        ({"logit_cap": 1e4}, ["logit_cap", "1e-06 to 1,000"]),
        ({"logit_cap": 1e-9}, ["logit_cap", "1e-06 to 1,000"]),
    ],
)
def test_wrong_arguments_are_named_with_what_would_be_right(change, names):
    q_nope, q_pe, rows, active, _ = make_problem("cpu", [4, 9])
    arguments = {"q_nope": q_nope, "q_pe": q_pe, "rows": rows, "active": active, "q_indptr": None}
    arguments |= {"out": None, "lse": None, "workspace": None, "backend": "triton", "sm_scale": 1.0}
    with pytest.raises(BadInput) as e:
        mla_decode(**(arguments | change if isinstance(change, dict) else change(arguments)))
    message = str(e.value)
    assert "\n" not in message
    assert all(n in message for n in names), message


def test_cuda_backend_says_why_it_cannot():
    q_nope, q_pe, rows, active, _ = make_problem("cpu", [4])
    with pytest.raises(BadInput, match="rows are on cpu"):
        mla_decode(q_nope, q_pe, rows, active, sm_scale=1.0, backend="cuda")


def test_triton_takes_over_where_the_cuda_kernels_do_not_compile(device, monkeypatch, caplog):
    from kvlab.kernels import hopper, nvrtc

    problem = make_problem(device, [20])[:4]
    tried = []

    def fail(*_, **__):
        tried.append(1)
        raise nvrtc.CompileError("no NVRTC for this driver")

    monkeypatch.setattr(hopper, "mla_decode", fail)
    monkeypatch.setattr(decode_backend, "_failed", {})
    monkeypatch.setattr(decode_backend, "chip", lambda _: (90, 2))
    monkeypatch.setattr(hopper, "supports", lambda *_: None)
    monkeypatch.setattr(decode_backend, "_is_cuda", lambda _: True)
    with pytest.raises(nvrtc.CompileError):
        mla_decode(*problem, sm_scale=0.1, backend="cuda")
    tune = Tuning(16, 16, 4, 1, 2, 1, "plain")
    if device == "cuda":
        tune = None
    for _ in range(2):
        out, _ = mla_decode(*problem, sm_scale=0.1, tune=tune)
        want, _ = mla_attention(*problem, sm_scale=0.1, dtype=torch.float64)
        assert (out.double() - want).norm() / want.norm() < 1e-3
    assert len(tried) == 2, "tried once more by auto, never again"
    assert "no NVRTC for this driver" in caplog.text


@pytest.mark.parametrize("offset", [1, 3])
def test_rows_at_odd_bytes_are_refused(device, offset):
    q_nope, q_pe, _, active, _ = make_problem(device, [4])
    arena = torch.zeros(90, 64, dtype=torch.uint8, device=device)
    with pytest.raises(BadInput, match="rows: expected rows that start at multiples of 2 bytes"):
        mla_decode(
            q_nope,
            q_pe,
            arena[:, offset : offset + 48].view(E4M3),
            active,
            sm_scale=1.0,
            backend="triton",
        )


def test_tuning_serves_every_head_count():
    for capability in (80, 89, 90, 100, 120):
        for columns in range(1, 1025, 7):
            for batch in (1, 16, 512):
                tune = tuning(capability, columns, batch)
                assert tune.block_h >= min(columns, 32)
                assert tune.method == ("bits" if capability == 80 else "cvt")


class Again:
    """A launch that was kept: notes what it is launched again with."""

    def __init__(self):
        self.of = []

    def again(self, q_nope, q_pe, rows, out):
        self.of.append(rows.data_ptr())


def test_a_layer_is_launched_again_only_where_all_but_the_addresses_is_the_last_one_s(monkeypatch):
    """Whatever else is another is checked and chosen anew; what Triton decodes has no launch to repeat."""
    launches, kept_by = [], ["cuda"]

    def mla_decode(q_nope, q_pe, rows, active, *, keep, **options):
        launches.append(Again())
        keep.extend(launches[-1:] if kept_by == ["cuda"] else [])
        return torch.zeros_like(q_nope), None

    monkeypatch.setattr(decode, "mla_decode", mla_decode)
    table, bounds = torch.arange(8, dtype=torch.int32), torch.tensor([0, 4, 8], dtype=torch.int32)
    q, rows = torch.zeros(2, 3, 4, 48).bfloat16(), torch.zeros(2, 9, 1, 48, dtype=torch.uint8)
    wide = torch.zeros(9, 1, 64, dtype=torch.uint8)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    usual = {
        "q_nope": q[0, :2, :, :32],
        "q_pe": q[0, :2, :, 32:],
        "rows": rows[0].view(e4m3),
        "active": ActiveSlots(table, bounds),
        "sm_scale": 1.0,
        "logit_cap": 0.0,
        "workspace": torch.zeros(64, dtype=torch.uint8),
    }
    layers = decode.Layers()
    layers(**usual)
    layers(**usual | {"q_nope": q[1, :2, :, :32], "rows": rows[1].view(e4m3)})
    assert [len(launches), launches[0].of] == [1, [rows[1].data_ptr()]]
    for other in (
        {"q_nope": usual["q_nope"].contiguous()},
        {"q_nope": q[0, :, :, :32], "q_pe": q[0, :, :, 32:]},
        {"q_nope": usual["q_nope"].half(), "q_pe": usual["q_pe"].half()},
        {"q_pe": usual["q_pe"].contiguous()},
        {"rows": rows[0].view(e5m2)},
        {"rows": rows[0, :8].view(e4m3)},
        {"rows": wide[..., :48].view(e4m3)},
        {"active": ActiveSlots(table, bounds)},
        {"sm_scale": 2.0},
        {"logit_cap": 3.0},
        {"workspace": torch.zeros(64, dtype=torch.uint8)},
    ):
        before = len(launches)
        layers(**usual | other)
        assert len(launches) == before + 1, other
        layers(**usual)
        assert len(launches) == before + 2
    before = len(launches)
    layers(**usual | {"rows": torch.zeros(9 * 48 + 8, dtype=torch.uint8)[8:].view(9, 1, 48).view(e4m3)})
    assert len(launches) == before + 1, "rows that do not start at 16 bytes"
    kept_by.clear()
    layers = decode.Layers()
    before = len(launches)
    for _ in range(3):
        layers(**usual)
    assert len(launches) == before + 3
