"""The reference against torch's own attention, against itself in parts, and where it must refuse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import paged_case, ragged_case, random_pool

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.reference import full_cast, gather_cast, mla_attention, shadow_cast

RANK, ROPE, HEADS = 24, 8, 3
F64 = {"dtype": torch.float64}


def finite_pool(slots: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(slots, 1, RANK + ROPE, generator=g).to(torch.float8_e4m3fn)


def queries(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, HEADS, RANK + ROPE, generator=g, dtype=torch.float64)
    return q[..., :RANK], q[..., RANK:]


def by_torch(q_nope, q_pe, rows, slots, scale, mask=None) -> torch.Tensor:
    """One request through scaled_dot_product_attention: every head reads the same latent."""
    k = rows[slots, 0].double()
    q = torch.cat([q_nope, q_pe], dim=-1).transpose(0, 1)
    k = k.expand(HEADS, *k.shape)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, k[..., :RANK], attn_mask=mask, scale=scale)
    return out.transpose(0, 1)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    page_size=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 99),
)
def test_decode_is_torchs_attention(lengths, page_size, seed):
    rows = finite_pool(40, seed)
    if page_size:
        a = paged_case(lengths, page_size, num_slots=40, seed=seed).active
    else:
        a = ragged_case(lengths, num_slots=40, seed=seed).active
    q_nope, q_pe = queries(len(lengths), seed)
    out, lse = mla_attention(q_nope, q_pe, rows, a, sm_scale=0.3, **F64)
    for b, slots in enumerate(a.slots()):
        if not lengths[b]:
            assert (out[b] == 0).all()
            assert (lse[b] == -math.inf).all()
            continue
        expected = by_torch(q_nope[b : b + 1], q_pe[b : b + 1], rows, slots, 0.3)
        torch.testing.assert_close(out[b : b + 1], expected, rtol=1e-12, atol=1e-12)
        logits = 0.3 * torch.cat([q_nope[b], q_pe[b]], dim=-1) @ rows[slots, 0].double().T
        torch.testing.assert_close(lse[b], torch.logsumexp(logits, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_several_query_tokens_see_no_successor(causal):
    """Speculative verify: the queries are the request's last tokens."""
    rows, lengths, tokens = finite_pool(40, 1), [7, 3, 5], [3, 0, 5]
    a = ragged_case(lengths, num_slots=40, seed=2).active
    q_indptr = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q_nope, q_pe = queries(8)
    out, _ = mla_attention(q_nope, q_pe, rows, a, sm_scale=0.3, q_indptr=q_indptr, causal=causal, **F64)
    for b, slots in enumerate(a.slots()):
        n, first, last = tokens[b], q_indptr[b], q_indptr[b + 1]
        mask = torch.ones(n, lengths[b], dtype=torch.bool).tril(lengths[b] - n) if causal else None
        expected = by_torch(q_nope[first:last], q_pe[first:last], rows, slots, 0.3, mask)
        torch.testing.assert_close(out[first:last], expected, rtol=1e-12, atol=1e-12)


def test_parts_merge_by_their_lse():
    """What split-KV relies on: two halves of a request, weighted by exp(lse), are the whole."""
    rows, a = finite_pool(40, 3), ragged_case([11], num_slots=40, seed=4, tail=0).active
    q_nope, q_pe = queries(1)
    whole, lse = mla_attention(q_nope, q_pe, rows, a, sm_scale=0.3, **F64)
    parts = []
    for cut in (a.table[:4], a.table[4:]):
        part = ActiveSlots.ragged(cut, torch.tensor([0, cut.numel()], dtype=torch.int32))
        parts.append(mla_attention(q_nope, q_pe, rows, part, sm_scale=0.3, **F64))
    weights = torch.stack([p[1] for p in parts])
    torch.testing.assert_close(torch.logsumexp(weights, 0), lse, rtol=1e-12, atol=1e-12)
    merged = sum(p[0] * torch.exp(p[1] - lse)[..., None] for p in parts)
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)


def test_k_scale_scales_keys_and_values():
    rows, a = finite_pool(40, 5), ragged_case([9], num_slots=40, seed=6).active
    q_nope, q_pe = queries(1)
    scaled, lse = mla_attention(q_nope, q_pe, rows, a, sm_scale=0.3, k_scale=0.5, **F64)
    halved = (rows.to(torch.bfloat16) * 0.5).contiguous()
    expected, lse_expected = mla_attention(q_nope, q_pe, halved, a, sm_scale=0.3, **F64)
    torch.testing.assert_close(scaled, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, lse_expected, rtol=1e-12, atol=1e-12)


def test_logit_cap_bounds_the_logits():
    rows, a = finite_pool(40, 7), ragged_case([9], num_slots=40, seed=8).active
    q_nope, q_pe = queries(1)
    far = mla_attention(q_nope, q_pe, rows, a, sm_scale=1e6, logit_cap=2.0, **F64)[1]
    assert (far <= 2.0 + math.log(9)).all()
    free = mla_attention(q_nope, q_pe, rows, a, sm_scale=0.3, **F64)
    loose = mla_attention(q_nope, q_pe, rows, a, sm_scale=0.3, logit_cap=1e7, **F64)
    torch.testing.assert_close(loose[0], free[0], rtol=1e-9, atol=1e-9)


def test_an_entry_that_is_no_slot_weighs_nothing():
    rows = finite_pool(40, 9)
    rows.view(torch.uint8)[0] = 0xFF
    holed = torch.tensor([3, -1, 7, 40, 8], dtype=torch.int32)
    whole = torch.tensor([3, 7, 8], dtype=torch.int32)
    q_nope, q_pe = queries(1)
    found = [
        mla_attention(
            q_nope,
            q_pe,
            rows,
            ActiveSlots.ragged(t, torch.tensor([0, t.numel()], dtype=torch.int32)),
            sm_scale=0.3,
            **F64,
        )
        for t in (holed, whole)
    ]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=1e-12)


def test_without_rope_the_row_is_the_latent():
    rows = finite_pool(40, 10)[..., :RANK].contiguous()
    a = ragged_case([6], num_slots=40, seed=1).active
    q_nope, _ = queries(1)
    out, _ = mla_attention(q_nope, None, rows, a, sm_scale=0.3, **F64)
    k = rows[a.slots()[0], 0].double()
    expected = torch.softmax(0.3 * q_nope[0] @ k.T, -1) @ k
    torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-12)


def test_the_casts_agree_where_they_overlap():
    rows = random_pool(40, 16, torch.float8_e5m2, seed=1)
    a = ragged_case([9, 4], num_slots=40, seed=2).active
    full = full_cast(rows, torch.float16)
    shadow = shadow_cast(rows, torch.zeros_like(full), a)
    compact, indices = gather_cast(rows, a, torch.float16)
    for b, slots in enumerate(a.slots()):
        new = ActiveSlots.ragged(indices, a.bounds).slots()[b]
        same = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(shadow[slots], full[slots], **same)
        torch.testing.assert_close(compact[new], full[slots], **same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(40, 1, 31).to(torch.float8_e4m3fn)}, r"rows: expected \[slots, 32\]"),
        ({"q_pe": torch.zeros(1, HEADS + 1, ROPE)}, r"q_pe: wrong shape; .*\[1, 3, qk_rope_head_dim\]"),
        ({"q_nope": torch.zeros(1, RANK)}, r"q_nope: wrong number of dimensions"),
        ({"q_indptr": torch.zeros(3, dtype=torch.int32)}, r"q_indptr: wrong shape; .*\[2\]"),
        (
            {"q_indptr": torch.tensor([1, 1], dtype=torch.int32)},
            r"q_indptr: .* from 0 to 1 at most, .*\[1, 1\]",
        ),
        (
            {"q_indptr": torch.tensor([0, 2], dtype=torch.int32)},
            r"q_indptr: .* from 0 to 1 at most, .*\[0, 2\]",
        ),
        ({"active": None}, r"active: expected ActiveSlots, got NoneType"),
        ({"dtype": torch.bfloat16}, r"dtype: expected torch.float32 or torch.float64, got torch.bfloat16"),
        ({"sm_scale": math.inf}, r"sm_scale: expected a finite number within float32, got inf"),
        ({"k_scale": torch.ones(1)}, r"k_scale: expected a finite number .* got torch.float32 \[1\]"),
        ({"logit_cap": None}, r"logit_cap: expected a finite number"),
    ],
)
def test_bad_shapes_are_named(change, message):
    q_nope, q_pe = queries(1)
    active = ragged_case([3], num_slots=40, seed=1).active
    good = {"q_nope": q_nope, "q_pe": q_pe, "rows": finite_pool(40, 1), "active": active, "sm_scale": 0.1}
    with pytest.raises(BadInput, match=message):
        mla_attention(**good | change)


def test_casts_name_what_they_cannot_take():
    rows, active = finite_pool(8, 1), ragged_case([3], num_slots=8, seed=1).active
    for cast in (lambda to: full_cast(rows, to), lambda to: gather_cast(rows, active, to)):
        with pytest.raises(BadInput, match=r"dtype: expected torch.bfloat16 or .*, got torch.int8"):
            cast(torch.int8)
    with pytest.raises(BadInput, match=r"active: expected ActiveSlots, got list"):
        gather_cast(rows, [1], torch.float16)
    with pytest.raises(BadInput, match=r"active: wrong device; expected tensors on cpu, got .* on meta"):
        shadow_cast(
            rows, torch.zeros(8, 1, RANK + ROPE).half(), ActiveSlots(active.table.to("meta"), active.bounds)
        )
