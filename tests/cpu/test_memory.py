"""The arithmetic of the pool, against sums over the shapes of tensors; SGLang's log to the last digit."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import gpus, memory, models
from kvlab.errors import BadInput
from kvlab.units import GIB

GLM5 = models.load("glm-5")
SLOTS = 495_552


def test_the_source_texts_pool_in_integers():
    p = memory.pool(GLM5, SLOTS)
    assert p.row_bytes == 576
    assert p.layer_bytes == 285_437_952
    assert p.pool_bytes == 22_264_160_256
    assert p.shadow_bytes == 44_528_320_512
    assert p.one_layer_shadow_bytes == 570_875_904
    assert p.cast_traffic_bytes == 856_313_856
    assert p.active_bytes(100) == 57_600
    assert p.active_traffic_bytes(100) == 172_800
    assert p.indexer_bytes == p.draft_bytes == 0


def test_with_the_indexer_it_is_the_texts_25_5():
    p = memory.pool(GLM5, SLOTS, indexer=True)
    assert p.pool_bytes + p.indexer_bytes == 27_366_363_648
    assert f"{(p.pool_bytes + p.indexer_bytes) / GIB:.2f}" == "25.49"


@pytest.mark.parametrize(
    ("model", "slots", "options", "logged"),
    [
        # recorded/h200-stock: `#tokens: 495552, KV size: 20.74 GB` and `#tokens: 65536, KV size: 5.48 GB`.
        ("glm-5", 495_552, {}, 20.74),
        ("glm-5", 65_536, {"kv_dtype": "bf16"}, 5.48),
        # sgl-project/sglang, public log: 464,768 tokens of GLM-5.2 FP8 with its indexer.
        ("glm-5.2", 464_768, {"page_size": 64, "indexer": True}, 23.91),
    ],
)
def test_what_sglang_logged(model, slots, options, logged):
    assert memory.pool(models.load(model), slots, **options).sglang_logs_gb == logged


@pytest.mark.parametrize(
    ("name", "row", "logged"),
    [
        ("fp8_e4m3", 576, 576),
        ("fp8_e5m2", 576, 576),
        ("bf16", 1152, 1152),
        ("fp8_dsa", 656, 656),
        ("fp4", 288 + 36, 288),
    ],
)
def test_rows_by_dtype(name, row, logged):
    p = memory.pool(GLM5, 1000, kv_dtype=name, page_size=64 if name == "fp8_dsa" else 1)
    assert p.row_bytes == row
    assert p.pool_bytes == 1000 * row * 78
    assert p.logged_bytes == (p.tokens + p.page_size) * logged * 78
    assert p.dtype.casts == (name != "bf16")
    assert p.cast_traffic_bytes == (0 if name == "bf16" else 1000 * (row + 2 * 576))
    assert p.one_layer_shadow_bytes == (0 if name == "bf16" else 1000 * 2 * 576)
    for alias in p.dtype.aliases:
        assert memory.dtype(alias.upper()) is p.dtype


def test_a_bf16_pool_is_read_as_it_is():
    p = memory.pool(GLM5, 1000, kv_dtype="bf16")
    assert (p.shadow_bytes, p.one_layer_shadow_bytes, p.cast_traffic_bytes, p.active_traffic_bytes(7)) == (
        0,
    ) * 4
    assert p.active_bytes(7) == 7 * 1152


def test_draft_layers_have_a_pool_of_their_own():
    p = memory.pool(GLM5, 1000, draft=True, indexer=True)
    assert p.draft_bytes == 1000 * (576 + 132)
    assert memory.pool(GLM5, 1000, draft=True).draft_bytes == 1000 * 576
    assert (
        p.allocated_bytes == memory.pool(GLM5, 1000, indexer=True).allocated_bytes + 1001 * 576 + 1002 * 132
    )
    assert p.logged_bytes == memory.pool(GLM5, 1000, indexer=True).logged_bytes


def test_layers_that_share_a_top_k_may_have_no_indexer_rows():
    glm52 = models.load("glm-5.2")
    assert memory.pool(glm52, 640, page_size=64, indexer=True).indexer_bytes == 640 * 132 * 78
    kept = memory.pool(glm52, 640, page_size=64, indexer=True, skip_shared_indexers=True)
    assert kept.indexer_bytes == 640 * 132 * 21
    halves = [
        memory.pool(
            glm52, 640, page_size=64, indexer=True, skip_shared_indexers=True, pp=2, pp_rank=i
        ).indexer_layers
        for i in (0, 1)
    ]
    assert sum(halves) == 21


NAMES = st.sampled_from(models.presets())
DTYPES = st.sampled_from(list(memory.DTYPES))


@st.composite
def pools(draw):
    geometry = models.load(draw(NAMES))
    kv = draw(DTYPES)
    page_size = draw(st.sampled_from([1, 2, 16, 32, 64, 128]))
    indexer = geometry.has_indexer and kv != "fp4" and draw(st.booleans())
    if kv == "fp8_dsa" and not geometry.has_indexer:
        kv = "fp8_e4m3"
    pp = draw(st.integers(1, 8))
    return memory.pool(
        geometry,
        draw(st.integers(page_size, 10**7)),
        kv_dtype=kv,
        page_size=page_size,
        tp=draw(st.sampled_from([n for n in range(1, 9) if geometry.num_attention_heads % n == 0])),
        pp=pp,
        pp_rank=draw(st.none() | st.integers(0, pp - 1)),
        indexer=indexer,
        draft=bool(geometry.num_nextn_predict_layers) and draw(st.booleans()),
        skip_shared_indexers=draw(st.booleans()),
    )


def tensors(p):
    """(shape, bytes an element, is it in the log line) of every tensor that SGLang makes for `p`."""
    arena = p.tokens + p.page_size
    pages = (p.tokens + p.page_size + 1) // p.page_size
    g = p.geometry
    for draft, layers in (
        (False, range(p.rank.first_layer, p.rank.end_layer)),
        (True, range(p.draft_layers)),
    ):
        for layer in layers:
            if p.dtype.name == "fp4":
                yield (arena, 1, g.latent_dim // 2), 1, not draft
                yield (arena, g.latent_dim // 16), 1, False
            else:
                width = {"bf16": g.latent_dim, "fp8_dsa": 656}.get(p.dtype.name, g.latent_dim)
                yield (arena, 1, width), 2 if p.dtype.name == "bf16" else 1, not draft
            skipped = not draft and p.skip_shared_indexers and layer in g.shared_indexer_layers
            if p.indexer and not skipped:
                yield (pages, p.page_size * (g.index_head_dim + 4)), 1, not draft


@given(pools())
@settings(max_examples=150)
def test_allocated_and_logged_are_the_sums_over_sglangs_tensors(p):
    sizes = []
    for shape, element, logged in tensors(p):
        size = element
        for n in shape:
            size *= n
        sizes.append((size, logged))
    assert p.allocated_bytes == sum(size for size, _ in sizes)
    assert p.logged_bytes == sum(size for size, logged in sizes if logged)
    assert abs(Fraction(p.sglang_logs_gb) - Fraction(p.logged_bytes, GIB)) <= Fraction(51, 10_000)


@given(pools())
def test_quantities_hold_together(p):
    layers = p.rank.layers
    assert p.pool_bytes == layers * p.layer_bytes
    assert p.shadow_bytes == layers * p.one_layer_shadow_bytes
    assert 0 <= p.slots - p.tokens < p.page_size
    assert p.tokens % p.page_size == 0
    if p.dtype.casts:
        assert p.cast_traffic_bytes == p.layer_bytes + p.one_layer_shadow_bytes
        assert p.active_traffic_bytes(p.slots) == p.cast_traffic_bytes
        assert p.one_layer_shadow_bytes == 2 * p.geometry.latent_dim * p.slots
        arena = p.slots - p.slots % p.page_size + p.page_size
        assert p.stock_cast_bytes == arena * p.geometry.latent_dim * 2
        assert p.full_shadow_bytes == arena * p.geometry.latent_dim * 2 * layers
    else:
        assert p.stock_cast_bytes == p.full_shadow_bytes == p.cast_traffic_bytes == 0
    assert p.active_bytes(p.slots) == p.layer_bytes


@given(pools(), st.integers(1, 10**6))
def test_more_slots_never_take_less(p, more):
    import msgspec

    bigger = msgspec.structs.replace(p, slots=p.slots + more)
    for field in (
        "pool_bytes",
        "indexer_bytes",
        "draft_bytes",
        "shadow_bytes",
        "allocated_bytes",
        "logged_bytes",
    ):
        assert getattr(bigger, field) >= getattr(p, field), field
    assert bigger.pool_bytes > p.pool_bytes


@given(NAMES, st.integers(1, 10**6), st.integers(1, 8))
def test_tp_leaves_the_pool_as_it_is_and_pp_shares_it_out(name, slots, pp):
    g = models.load(name)
    whole = memory.pool(g, slots)
    tp = max(n for n in range(1, 9) if g.num_attention_heads % n == 0)
    assert memory.pool(g, slots, tp=tp).pool_bytes == whole.pool_bytes
    stages = [memory.pool(g, slots, pp=pp, pp_rank=i) for i in range(pp)]
    assert sum(s.pool_bytes for s in stages) == whole.pool_bytes
    assert memory.pool(g, slots, pp=pp).pool_bytes == max(s.pool_bytes for s in stages)


@given(pools(), st.sampled_from(gpus.names()), st.integers(0, 200 * GIB))
@settings(max_examples=80)
def test_the_largest_pool_fits_and_one_page_more_does_not(p, card, weights):
    import msgspec

    gpu = gpus.lookup(card)
    for largest, fits in (("largest", "fits"), ("largest_stock", "fits_stock")):
        most = getattr(memory.fit(p, gpu=gpu, weights=weights), largest)
        assert most % p.page_size == 0
        if most:
            assert getattr(memory.fit(msgspec.structs.replace(p, slots=most), gpu=gpu, weights=weights), fits)
        more = msgspec.structs.replace(p, slots=most + p.page_size)
        assert not getattr(memory.fit(more, gpu=gpu, weights=weights), fits)


@pytest.mark.parametrize("full_shadow", [False, True])
@pytest.mark.parametrize("pages", [*range(1, 10), 63, 64, 65, 1024])
def test_a_budget_that_is_met_exactly_is_enough(pages, full_shadow):
    p = memory.pool(GLM5, pages * 64, page_size=64, indexer=True)
    budget = p.allocated_bytes + (p.full_shadow_bytes if full_shadow else p.stock_cast_bytes)
    assert memory.largest_pool(p, budget, full_shadow=full_shadow) == pages * 64
    assert memory.largest_pool(p, budget - 1, full_shadow=full_shadow) == (pages - 1) * 64


def test_a_budget_below_nothing_holds_nothing():
    assert memory.largest_pool(memory.pool(GLM5, 9), -1, full_shadow=True) == 0


def test_without_options_it_is_the_whole_model():
    p = memory.pool(GLM5, 9)
    assert (p.rank.heads, p.rank.layers, p.page_size, p.dtype.name) == (64, 78, 1, "fp8_e4m3")
    assert (p.indexer, p.draft_layers, p.skip_shared_indexers) == (False, 0, False)


def test_61_and_25_5_and_41_7_are_128_and_do_not_fit_96():
    p = memory.pool(GLM5, SLOTS, indexer=True)
    f = memory.fit(p, gpu=gpus.lookup("rtx-pro-6000"), weights=61 * GIB)
    assert (f.fits, f.fits_stock) == (False, True)
    assert round(f.needed / GIB) == 128
    assert f.needed == 61 * GIB + p.allocated_bytes + p.full_shadow_bytes
    assert f.largest < SLOTS < f.largest_stock
    reserved = memory.fit(p, gpu=gpus.lookup("rtx-pro-6000"), weights=61 * GIB, reserve=10 * GIB)
    assert reserved.fits_stock is False
    assert reserved.largest_stock < f.largest_stock


def test_unknown_weights_or_card_are_said_not_guessed():
    p = memory.pool(GLM5, SLOTS)
    for options, missing in (({}, 2), ({"weights": 61 * GIB}, 1), ({"gpu": gpus.lookup("h200")}, 1)):
        f = memory.fit(p, **options)
        assert (f.fits, f.fits_stock, f.needed, f.largest) == (None,) * 4
        assert len(f.unknown) == missing
    assert "--weights" in f.unknown[0]


@pytest.mark.parametrize(
    ("model", "slots", "options", "says"),
    [
        ("glm-5", 0, {}, "--slots 0"),
        ("glm-5", -1, {}, "--slots -1"),
        ("glm-5", 63, {"page_size": 64}, "less than one page"),
        ("glm-5", 10, {"page_size": 0}, "--page-size 0"),
        ("glm-5", 10**101, {}, "--slots"),
        ("deepseek-v3", 10, {"indexer": True}, "--indexer"),
        ("glm-5", 10, {"indexer": True, "kv_dtype": "fp4"}, "--indexer"),
        ("deepseek-v3", 10, {"kv_dtype": "fp8_dsa"}, "--dtype fp8_dsa"),
        ("kimi-k2", 10, {"draft": True}, "--draft"),
        ("glm-5", 10, {"kv_dtype": "int3"}, "--dtype"),
        ("glm-5", 10, {"tp": 3}, "--tp 3"),
        ("glm-5", 10, {"tp": 0}, "--tp 0"),
        ("glm-5", 10, {"pp": 79}, "--pp 79"),
        ("glm-5", 10, {"pp": 2, "pp_rank": 2}, "--pp-rank 2"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(model, slots, options, says):
    with pytest.raises(BadInput) as refused:
        memory.pool(models.load(model), slots, **options)
    assert says in str(refused.value)


def test_huge_pools_are_exact():
    p = memory.pool(GLM5, 10**30)
    assert p.pool_bytes == 10**30 * 576 * 78
    assert p.allocated_bytes - p.pool_bytes == 576 * 78


def test_active_slots_are_distinct_slots_of_the_pool():
    p = memory.pool(GLM5, 10)
    assert [memory.check_active(p, n) for n in (0, 10)] == [0, 10]
    for wrong in (-1, 11):
        with pytest.raises(BadInput, match=f"--active {wrong}"):
            memory.check_active(p, wrong)
