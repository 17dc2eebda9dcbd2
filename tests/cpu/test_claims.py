"""The ledger of the source text: each figure computed again, and its verdict held against what came out."""

import ast
import json
import re
import statistics
from importlib import resources
from pathlib import Path

import msgspec
import pytest
import torch

from kvlab import backends, data, gpus, memory, models, plans, pool, suspects
from kvlab import trace as kt
from kvlab.backends.reproduce import Raised
from kvlab.backends.rules import load as load_rules
from kvlab.bench import recorded_steps
from kvlab.book import recorded
from kvlab.book.ledger import VERDICTS, entries
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.reference import full_cast, gather_cast, mla_attention
from kvlab.patch.sites import FAMILIES, KINDS
from kvlab.units import GB, GIB, KB, MB
from kvlab.weights import weights

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = {c.id: c for c in entries()}
GLM5 = models.load("glm-5")
SLOTS = int(CLAIMS["slots"].value)
POOL = memory.pool(GLM5, SLOTS)
STEP_MS, CAST_MS = CLAIMS["step_ms"].value, CLAIMS["cast_ms"].value
README = data.recorded("h200-stock") / "README.md"


def verdict_of(said, computed, *, within=0.001):
    """Confirmed if the figure rounds to what the text prints or is within its "approximately"."""
    digits = len(f"{said:g}".partition(".")[2])
    rounds = round(computed, digits) == said
    return "confirmed" if rounds or abs(computed / said - 1) <= within else "corrected"


def holds(claim, computed, *, value=None):
    """The ledger's verdict is the one that the figure gives."""
    said = CLAIMS[claim].value if value is None else value
    assert verdict_of(said, computed) == CLAIMS[claim].verdict


def h200():
    return kt.report(kt.read(data.recorded("h200-stock") / "decode.trace.json.gz"))


def test_tokens_per_second():
    holds("tokens_per_second", 1000 / STEP_MS)


def test_theoretical_maximum():
    ceiling = STEP_MS / (STEP_MS - CAST_MS)
    assert round(ceiling, 2) == 3.08
    control = recorded_steps.step(README, "control_bf16")
    assert recorded_steps.step(README, "stock") / control > 6
    floor = suspects.source_text().floor_ms
    assert 8 < STEP_MS / floor < 13
    # The floor by bytes alone is far below both.
    read = weights(GLM5).rank_bytes(tp=8, mlp="nvfp4", other="bf16")
    floor_ms = 1e3 * read / gpus.lookup("rtx-pro-6000").bandwidth
    assert STEP_MS / floor_ms > 20 > ceiling
    assert CLAIMS["theoretical_maximum"].verdict == "confirmed"


def test_suspects():
    said, rank = suspects.source_text(), suspects.recorded_rank()
    assert said.step_ms == STEP_MS
    for name in ("gemm", "experts", "routing", "communication"):
        assert said.suspect(name).share < said.threshold, name
        assert rank.suspect(name).share < 0.05, name
    assert said.left_standing == rank.left_standing == ["cast"]
    # Minor beside the cast; of what is left without it, no longer.
    assert said.after["communication"] == "worth looking at"
    # The text's own two times bound them all together.
    assert (STEP_MS - CAST_MS) / STEP_MS < 0.33
    assert CLAIMS["suspects"].verdict == "confirmed"


def test_share():
    share = 100 * CAST_MS / STEP_MS
    assert round(share, 1) == 67.6
    holds("share", share)
    assert round(CAST_MS / 0.69, 1) == 93.6


def test_kernel():
    found = h200().kv_cast
    assert "unrolled_elementwise_kernel" in found.kernel
    assert "direct_copy_kernel_cuda" in found.kernel
    # Large enough that a pause of a busy host in another operator does not outweigh the casts.
    live = pool.profile("stock", slots=20_000, context=20, heads=2, steps=2)
    assert live.operators[0].name == "aten::copy_"
    assert CLAIMS["kernel"].verdict == "confirmed"


def test_dominant():
    assert CAST_MS / STEP_MS > 0.5
    alone = h200()
    busiest = kt.report(kt.read(data.recorded("h200-69") / "off" / "decode-b20-c100.trace.json.gz"))
    for found in (alone, busiest):
        shares = {name: c.share for name, c in found.categories.items()}
        assert max(shares, key=shares.get) == "dtype cast"
        assert shares["dtype cast"] > 0.5
    assert CLAIMS["dominant"].verdict == "confirmed"


def test_every_token():
    found = h200()
    # One a layer and step, each over the whole pool, whatever the batch: not one a token.
    assert found.kv_cast.copies_per_step == found.layers == GLM5.attention_layers
    assert found.kv_cast.pool_slots == SLOTS
    one, three = (pool.profile("stock", slots=900, context=20, batch=b, heads=2, steps=2) for b in (1, 3))
    assert one.stage("cast").allocated == three.stage("cast").allocated
    assert CLAIMS["every_token"].verdict == "corrected"


def test_layers():
    holds("layers", GLM5.attention_layers)
    holds("layers", h200().kv_cast.copies_per_step)


def test_row_elements():
    holds("row_elements", GLM5.kv_lora_rank + GLM5.qk_rope_head_dim)


def test_cast_traffic():
    assert POOL.cast_traffic_bytes == 856_313_856
    holds("cast_traffic", POOL.cast_traffic_bytes / MB)
    # The trace's launch grid gives the same, and the padding slot.
    assert h200().kv_cast.bytes_per_copy == POOL.cast_traffic_bytes + 3 * 576


def test_zero_cost_view():
    found = pool.profile("stock", slots=2_000, context=20, heads=2, steps=2)
    assert found.view_shares_storage
    assert found.stage("view").allocated == 0
    assert CLAIMS["zero_cost_view"].verdict == "confirmed"


def test_cast_entire_buffer():
    kept = {
        (slots, context): pool.profile("stock", slots=slots, context=context, heads=2, steps=2)
        .stage("cast")
        .allocated
        for slots in (500, 1_500)
        for context in (20, 80)
    }
    assert kept == {(s, c): (s + 1) * 576 * 2 for s, c in kept}
    assert CLAIMS["cast_entire_buffer"].verdict == "confirmed"


def test_forward_decode():
    # Two families, each with decode and extend; tests/sglang finds all four in the source of every release.
    assert {f"{f.name}.{k}" for f in FAMILIES for k in KINDS} == {
        "flashinfer_mla.decode",
        "flashinfer_mla.extend",
        "fa3.decode",
        "fa3.extend",
    }
    for release in ("0.5.9", "0.5.23"):
        found = backends.answer("deepseek-r1", "h200", release)["backends"]
        assert {b["backend"] for b in found if b["casts_pool"] and b["works"]} >= {"flashinfer", "fa3"}
    assert CLAIMS["forward_decode"].verdict == "corrected"


def test_shadow():
    assert POOL.shadow_bytes == 44_528_320_512
    for unit in (GB, GIB):
        holds("shadow", POOL.shadow_bytes / unit)
    assert f"{POOL.shadow_bytes / GIB:.2f}" == "41.47"


def test_one_layer_not_considered():
    assert POOL.one_layer_shadow_bytes == 570_875_904
    assert POOL.one_layer_shadow_bytes * GLM5.attention_layers == POOL.shadow_bytes
    # What stock holds for its own cast, but for the padding slot; it fits where the copy of all does not.
    assert POOL.stock_cast_bytes - POOL.one_layer_shadow_bytes == 2 * 576
    fit = memory.fit(
        memory.pool(GLM5, SLOTS, indexer=True), gpu=gpus.lookup("rtx-pro-6000"), weights=61 * GIB
    )
    assert (fit.fits, fit.fits_stock) == (False, True)
    assert CLAIMS["one_layer_not_considered"].verdict == "corrected"


def test_pool_gb():
    assert POOL.pool_bytes == 22_264_160_256
    for unit in (GB, GIB):
        holds("pool_gb", POOL.pool_bytes / unit)
    indexed = POOL.pool_bytes + memory.pool(GLM5, SLOTS, indexer=True).indexer_bytes
    assert indexed == 27_366_363_648
    assert verdict_of(CLAIMS["pool_gb"].value, indexed / GIB) == "confirmed"


def test_card_memory():
    card = gpus.lookup("rtx-pro-6000")
    holds("card_memory", int(re.match(r"(\d+) GB", card.advertised)[1]))
    holds("card_memory", card.memory / GIB)
    for unit in (GB, GIB):
        parts = (CLAIMS["weights"].value + CLAIMS["pool_gb"].value + CLAIMS["shadow"].value) * unit
        assert parts > card.memory


def test_active_slots():
    said = CLAIMS["active_slots"]
    assert POOL.active_bytes(int(said.also["slots"])) == 57_600
    holds("active_slots", POOL.active_bytes(int(said.also["slots"])) / KB)
    assert said.also["pool_slots_thousand"] == SLOTS // 1000


def test_pool_layer():
    assert POOL.layer_bytes == 285_437_952
    holds("pool_layer", POOL.layer_bytes / MB)


def test_reduction():
    reduction = SLOTS / CLAIMS["active_slots"].also["slots"]
    assert round(reduction, 2) == 4955.52
    holds("reduction", reduction)


def test_unrelated_sequences():
    # One request in a pool with nothing else in it: every empty slot is cast.
    found = pool.profile("stock", slots=1_500, context=20, heads=2, steps=2)
    empty = found.pool_slots - found.tokens
    assert found.stage("cast").allocated == (found.tokens + empty) * 576 * 2
    assert empty > 50 * found.tokens
    assert CLAIMS["unrelated_sequences"].verdict == "corrected"


def test_only_active():
    run = json.loads((data.recorded("h200-step-5") / "identity.json").read_text("utf-8"))
    ours = [c for c in run["compared"] if c["case"]["strategy"] in ("exact", "shadow", "gather")]
    assert len(ours) >= 7
    assert all(c["identical"] and "together" in c["sections"] for c in ours)
    # And an active row does matter: zeroed, it changes tokens.
    stock = [r for r in run["runs"] if r["case"]["strategy"] == "stock"]
    assert all(r["controls"]["a_zeroed_row_changes_tokens"] for r in stock)
    assert CLAIMS["only_active"].verdict == "confirmed"


def test_concurrency():
    rows = [r.raw for r in recorded("h200-stock/kernels.json", "rows") if r.raw["what"] == "decode"]
    by_slots = sorted((r["bs"] * r["ctx"], r["triton_gather_us"]) for r in rows)
    small, large = by_slots[0], by_slots[-1]
    assert SLOTS / small[0] > 4_900
    assert SLOTS / large[0] < 2
    assert large[1] > 50 * small[1]
    assert CLAIMS["concurrency"].verdict == "confirmed"


def test_gather_negligible():
    gather = recorded("h200-stock/kernels.json", "rows[what=decode,bs=1,ctx=100].triton_gather_us")
    full = recorded("h200-stock/kernels.json", "rows[what=cast full pool].us")
    assert float(gather) < 0.005 * float(full)
    assert CLAIMS["gather_negligible"].verdict == "confirmed"


def backend(name):
    found = backends.answer("glm-5", "rtx-pro-6000", "0.5.9")["backends"]
    return next(b for b in found if b["backend"] == name)


def raised(name):
    document = json.loads((data.recorded("backend-failures") / "raised.json").read_text("utf-8"))
    return next(r for r in msgspec.convert(document["raised"], list[Raised]) if r.name == name)


def test_trtllm_mla():
    said = CLAIMS["trtllm_mla"]
    assert GLM5.qk_nope_head_dim == said.also["glm5"]
    found = backend("trtllm_mla")
    assert not found["works"]
    words = f"Expected qk_nope_head_dim == {said.value:.0f}, got {said.also['glm5']:.0f}"
    assert words in found["reason"]
    assert raised("trtllm_mla").says == words

    def says_so(release):
        known = load_rules("sglang", release)
        check = load_rules("flashinfer-python", known["pins"]["flashinfer-python"])["mla_shape"]
        return "GlmMoeDsaForCausalLM" in known["models"] and words in check["says"].values()

    # One SGLang release has GLM-5 and pins a flashinfer with these words: the one that is quoted.
    assert [r for r in backends.releases() if says_so(r)] == [raised("cutlass_mla").release]
    assert said.verdict == "confirmed"


def test_cutlass_mla():
    found = backend("cutlass_mla")
    assert not found["works"]
    assert "page size" in found["reason"]
    assert "AssertionError" in found["reason"]
    # Neither line is the kernel's: the argument handler's page size meets the pool's assertion.
    moved, pool_line = found["evidence"][:2]
    assert moved["file"] == "sglang/srt/server_args.py"
    assert (raised("cutlass_mla").exception, raised("cutlass_mla").says) == ("AssertionError", "")
    assert (raised("cutlass_mla").file, raised("cutlass_mla").line) == (pool_line["file"], pool_line["line"])
    known = load_rules("sglang", "0.5.9")
    assert known["constraints"]["cutlass_mla"]["page"]["becomes"] == 128
    assert known["dsa"]["pool_page"]["value"] == 64
    assert CLAIMS["cutlass_mla"].verdict == "confirmed"


def test_stuck():
    triton, flashinfer = backend("triton"), backend("flashinfer")
    assert triton["works"]
    assert not triton["casts_pool"]
    assert flashinfer["works"]
    assert flashinfer["casts_pool"]
    assert CLAIMS["stuck"].verdict == "corrected"


def test_format_required():
    def native(release):
        text = (
            resources.files("kvlab.backends")
            .joinpath(f"rules/flashinfer-python-{release}.json")
            .read_text("utf-8")
        )
        return json.loads(text)["native_fp8"]

    # flashinfer's MLA kernels take FP8 rows from 0.6.14 on; the text's release, 0.6.3, has none.
    assert not native("0.6.3")
    assert not native("0.6.13")
    assert native("0.6.14")["kernels"]
    newest = backends.answer("glm-5", "h200", "0.5.23")["backends"]
    stock = next(b for b in newest if b["backend"] == "flashinfer")
    assert "casts the whole pool" in stock["reason"]
    # Nor would it help on the text's card: Hopper's alone.
    assert native(backends.releases("flashinfer-python")[-1])["majors"] == [9]
    assert CLAIMS["format_required"].verdict == "corrected"


def cache(slots=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(slots, 1, 576, generator=g).to(torch.float8_e4m3fn)
    q = torch.randn(1, 4, 576, generator=g).to(torch.bfloat16)
    return rows, q[..., :512], q[..., 512:]


def attend(q_nope, q_pe, rows, indices):
    bounds = torch.tensor([0, len(indices)], dtype=torch.int32)
    active = ActiveSlots.ragged(indices.to(torch.int32), bounds)
    return mla_attention(q_nope, q_pe, rows, active, sm_scale=256**-0.5)[0]


def test_inplace_corrupts():
    rows, q_nope, q_pe = cache()
    indices = torch.tensor([3, 7, 8])
    before = attend(q_nope, q_pe, rows, indices)
    # A BF16 row in an FP8 row's place runs over the next slot: the text's variant, one row at a time.
    raw = rows.view(torch.uint8).flatten()
    for slot in indices.tolist():
        wide = full_cast(rows[slot], torch.bfloat16).flatten().view(torch.uint8)
        raw[slot * 576 : slot * 576 + wide.numel()] = wide
    after = attend(q_nope, q_pe, rows, indices)
    assert not torch.equal(before, after)
    # The released code with it: a first step that can be right, a second that is not, a pool that is changed.
    seen = {v.layout: v for v in plans.recorded().variants if v.name == "in place"}
    apart, close = seen["every other slot"], seen["neighbouring slots"]
    assert (apart.first_is_same, apart.second_is_same, close.first_is_same) == (True, False, False)
    assert apart.pool_bytes_changed > 0.1 * apart.pool_bytes
    assert CLAIMS["inplace_corrupts"].verdict == "confirmed"


def test_replan_needed():
    rows, q_nope, q_pe = cache()
    indices = torch.tensor([30, 2, 17, 9])
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    active = ActiveSlots.ragged(indices.to(torch.int32), bounds)
    compact, swapped = gather_cast(rows, active, torch.bfloat16)
    # The lengths, all that a plan is made of, stay as they are; the index buffer alone is swapped.
    again = mla_attention(q_nope, q_pe, compact, ActiveSlots.ragged(swapped, bounds), sm_scale=256**-0.5)[0]
    assert torch.equal(again, attend(q_nope, q_pe, full_cast(rows, torch.bfloat16), indices))
    # In the released code: the text's variant and two without a plan, all with stock's bits.
    seen = {v.name: v for v in plans.recorded().variants if v.layout == "every other slot"}
    for name, planned in (("replan", seen["replan"].layers), ("gather", 0), ("shadow", 0)):
        v = seen[name]
        assert (v.first_is_same, v.second_is_same, v.pool_bytes_changed, v.plans_per_step) == (
            True,
            True,
            0,
            planned,
        )
    # No release's run reads what plan keeps of the lengths.
    kept = {"_qo_indptr_buf", "_kv_indptr_buf", "_kv_len_arr_buf"}
    assert not any(kept & set(r.reads) for r in plans.recorded().releases)
    assert CLAIMS["replan_needed"].verdict == "corrected"


def test_planned():
    seen = plans.recorded()
    # In the text's release run reads the index buffer anew, and nothing that plan kept of the lengths.
    read = {f.kept.name: f.is_read for f in seen.frozen}
    assert read["_kv_indices_buf"]
    assert not read["_kv_indptr_buf"]
    assert not read["_kv_len_arr_buf"]
    assert CLAIMS["planned"].verdict == "corrected"


def test_past_the_end():
    found = plans.recorded().careless
    assert found.past_the_end > 0
    assert found.largest_index >= found.compact_rows
    assert found.raised == ""
    assert CLAIMS["past_the_end"].verdict == "confirmed"


def test_replan_feasible():
    seen = plans.recorded()
    again = next(v for v in seen.variants if v.name == "replan")
    assert again.first_is_same
    assert again.second_is_same
    assert again.plans_per_step == again.layers
    # Each plan copies to the host, which a captured graph cannot hold.
    assert next(r for r in seen.releases if r.release == seen.flashinfer).host_copies > 0
    assert CLAIMS["replan_feasible"].verdict == "corrected"


def test_intercept():
    # The seam, before the released forward_decode: the gather put in between gives stock's bits, twice.
    found = next(v for v in plans.recorded().variants if v.name == "gather")
    assert (found.first_is_same, found.second_is_same, found.pool_bytes_changed) == (True, True, 0)
    assert CLAIMS["intercept"].verdict == "confirmed"


def test_run_decorator():
    found = plans.recorded().decorated
    assert found.is_the_function
    assert found.unwraps_to_the_function
    assert found.result_is_the_function_s
    assert found.logged.endswith("FlashInfer API Call: BatchMLAPagedAttentionWrapper.run")
    assert all(any("flashinfer_api" in d for d in r.decorators) for r in plans.recorded().releases)
    assert CLAIMS["run_decorator"].verdict == "corrected"


def test_criteria():
    seen = plans.recorded()
    # Nothing lasts without graphs; under graphs no more than the layer that stock keeps there.
    ours = [v for v in seen.variants if v.name in ("shadow", "gather")]
    assert [v.kept_bytes for v in ours] == [0, 0]
    replayed = [r for r in seen.readings if r.lengths == "the backend's"]
    assert all(0 < r.kept_bytes <= r.stock_bytes and r.is_same for r in replayed)
    # Request table and index buffer are as before.
    assert all(v.tables_as_before for v in ours)
    # flashinfer is imported in one place, to be asked what it can.
    importing = set()
    for path in (ROOT / "kvlab" / "patch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                if any(n.split(".")[0] == "flashinfer" for n in names):
                    importing.add(path.name)
    assert importing == {"native.py"}
    assert CLAIMS["criteria"].verdict == "confirmed"


def test_every_claim_is_quoted_from_the_text_once_and_decided():
    assert len(CLAIMS) == len(entries()) >= 43
    for claim in CLAIMS.values():
        assert claim.quote.strip(), claim.id
        assert claim.why.strip(), claim.id
        assert claim.verdict in VERDICTS
        if claim.value is not None:
            # The figure is the quote's own.
            figure = f"{claim.value:,g}" if claim.value < 1e4 else f"{int(claim.value):,}"
            spoken = {"8": "eight"}.get(figure, figure)
            plain = claim.quote.replace("5000x", "5,000x")
            assert spoken in plain, (claim.id, spoken)


def test_claims_that_are_decided_name_their_test_and_others_name_none():
    here = {name for name in globals() if name.startswith("test_")}
    for claim in CLAIMS.values():
        if claim.test is not None:
            file, _, name = claim.test.partition("::")
            assert file == "tests/cpu/test_claims.py"
            assert name == f"test_{claim.id}"
            assert name in here, claim.id
            assert claim.verdict != "untestable here"
        else:
            assert claim.verdict == "untestable here", claim.id


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_wrong_figure_changes_the_verdict(factor):
    confirmed = [c for c in CLAIMS.values() if c.verdict == "confirmed" and c.value and c.test]
    assert len(confirmed) >= 8
    for claim in confirmed:
        assert verdict_of(claim.value, claim.value) == "confirmed"
        assert verdict_of(claim.value, claim.value * factor) == "corrected", claim.id


def test_the_recorded_cast_agrees_with_itself():
    """Three roads to the pool's size in the recorded trace: its grid, its duration, the server's option."""
    found = h200().kv_cast
    assert found.pool_slots == recorded_steps.read(README)[0].pool == SLOTS
    assert abs(found.pool_slots_by_duration / SLOTS - 1) < 0.05
    assert statistics.fmean(found.elements_per_copy) == pytest.approx(found.pool_rows * 576, rel=1e-5)
