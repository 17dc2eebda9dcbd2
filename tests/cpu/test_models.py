"""Geometry from presets and config.json, and the share of one rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from kvlab import models
from kvlab.errors import BadInput

TRANSFORMERS = {
    "glm-5": transformers.GlmMoeDsaConfig,
    "glm-5.2": transformers.GlmMoeDsaConfig,
    "deepseek-v3": transformers.DeepseekV3Config,
    "deepseek-r1": transformers.DeepseekV3Config,
    "deepseek-v3.2": transformers.DeepseekV32Config,
    "glm-4.7-flash": transformers.Glm4MoeLiteConfig,
    "longcat-flash": transformers.LongcatFlashConfig,
}


def config(**changes):
    base = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return {key: value for key, value in (base | changes).items() if value is not ...}


@pytest.mark.parametrize("name", models.presets())
def test_every_preset_loads_and_each_value_has_a_source(name):
    geometry = models.load(name)
    assert geometry.name == name
    assert geometry.latent_dim == geometry.kv_lora_rank + geometry.qk_rope_head_dim
    unsourced = {
        field
        for field in geometry.__struct_fields__
        if field
        not in ("name", "sources", "architecture", "shared_indexer_layers", "num_nextn_predict_layers")
        and getattr(geometry, field) is not None
        and not geometry.sources.get(field)
    }
    assert not unsourced
    assert geometry.num_nextn_predict_layers == 0 or geometry.sources["num_nextn_predict_layers"]


@pytest.mark.parametrize(("name", "config_class"), TRANSFORMERS.items())
def test_values_said_to_be_a_transformers_default_are_it(name, config_class):
    geometry, shipped = models.load(name), config_class()
    said = [field for field, source in geometry.sources.items() if config_class.__name__ in source]
    assert len(said) >= 10
    for field in said:
        if field == "first_k_dense_replace":
            kinds = getattr(shipped, "mlp_layer_types", None)
            want = kinds.index("sparse") if kinds else shipped.first_k_dense_replace
        elif field == "attention_layers":
            want = 2 * shipped.num_layers if name == "longcat-flash" else shipped.num_hidden_layers
        else:
            want = getattr(shipped, field)
        have = want if field in ("num_layers", "num_hidden_layers") else getattr(geometry, field)
        assert have == want, field


def test_glm_5_is_the_model_of_the_recorded_run():
    g = models.load("GLM-5")
    assert (g.attention_layers, g.num_attention_heads, g.hidden_size) == (78, 64, 6144)
    assert (g.q_lora_rank, g.kv_lora_rank, g.qk_nope_head_dim, g.qk_rope_head_dim, g.v_head_dim) == (
        2048,
        512,
        192,
        64,
        256,
    )
    assert (g.n_routed_experts, g.num_experts_per_tok, g.n_shared_experts, g.first_k_dense_replace) == (
        256,
        8,
        1,
        3,
    )
    assert (g.latent_dim, g.indexer_row_bytes) == (576, 132)
    assert models.load("zai-org/GLM-5") is models.load("glm5") is g
    assert g.sm_scale == 1 / 16


def test_config_from_path_folder_and_dict_agree(tmp_path):
    wanted = config()
    (tmp_path / "config.json").write_text(json.dumps(wanted))
    shapes = [models.load(wanted), models.load(str(tmp_path)), models.load(tmp_path / "config.json")]
    assert {(g.attention_layers, g.latent_dim, g.num_attention_heads) for g in shapes} == {(61, 576, 128)}
    assert shapes[1].name == tmp_path.name
    assert set(shapes[1].sources.values()) == {f"config.json of {tmp_path.name}"}


def test_the_config_classes_transformers_writes_are_read(tmp_path):
    for name, config_class in TRANSFORMERS.items():
        config_class().save_pretrained(tmp_path / name)
        written, preset = models.load(tmp_path / name), models.load(name)
        for field in (
            "attention_layers",
            "latent_dim",
            "num_attention_heads",
            "indexer_row_bytes",
            "hidden_size",
        ):
            assert getattr(written, field) == getattr(preset, field), (name, field)


@pytest.mark.parametrize("key", ["text_config", "language_config", "llm_config"])
def test_a_nested_language_model_is_found(key):
    inner = config(model_type="kimi_k2", num_attention_heads=64)
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], key: inner}
    g = models.load(outer)
    assert (g.attention_layers, g.num_attention_heads) == (61, 64)
    assert g.architecture == "KimiK25ForConditionalGeneration"
    assert not g.has_indexer


def test_dsa_needs_an_architecture_that_has_it_and_a_top_k():
    assert models.load(config(index_topk=2048, index_head_dim=128)).indexer_row_bytes == 132
    assert models.load(config(index_topk=None, index_head_dim=128)).indexer_row_bytes == 0
    other = config(index_topk=2048, index_head_dim=128, architectures=["LongcatFlashForCausalLM"])
    assert models.load(other).indexer_row_bytes == 0
    # A config.json may leave the indexer to its class.
    left_out = config(architectures=["GlmMoeDsaForCausalLM"], model_type="glm_moe_dsa")
    g = models.load(left_out)
    assert (g.index_head_dim, g.index_topk) == (128, 2048)
    assert "transformers" in g.sources["index_head_dim"]


def test_shared_indexer_layers_follow_frequency_pattern_and_types():
    glm52 = models.load("glm-5.2")
    by_frequency = glm52.shared_indexer_layers
    assert len(by_frequency) == 57
    assert all(i not in by_frequency for i in (0, 1, 2, 6, 10, 74))
    dsa = {"index_topk": 2048, "index_head_dim": 128, "num_hidden_layers": 6}
    assert models.load(config(**dsa, index_topk_pattern="FFSSFS")).shared_indexer_layers == (2, 3, 5)
    types = ["full", "shared", "shared", "full", "shared", "full"]
    assert models.load(config(**dsa, indexer_types=types)).shared_indexer_layers == (1, 2, 4)
    shipped = transformers.GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
    assert tuple(i for i, kind in enumerate(shipped.indexer_types) if kind == "shared") == by_frequency


def test_hybrids_count_only_layers_with_a_latent_row():
    kimi_linear = config(
        architectures=["KimiLinearForCausalLM"],
        model_type="kimi_linear",
        num_hidden_layers=27,
        linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
    )
    assert models.load(kimi_linear).attention_layers == 7
    assert models.load("longcat-flash").attention_layers == 56
    with pytest.raises(BadInput, match="mixes MLA"):
        models.load(config(layer_group_size=8))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (config(kv_lora_rank=...), "no multi-head latent attention"),
        (config(kv_lora_rank=None), "no multi-head latent attention"),
        (config(use_mla=False), "no multi-head latent attention"),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "LlamaForCausalLM has no multi-head",
        ),
        ({"hello": 1}, "no model's config"),
        (config(kv_lora_rank=0), "kv_lora_rank is 0"),
        (config(kv_lora_rank=True), "kv_lora_rank is True"),
        (config(kv_lora_rank="512"), "kv_lora_rank is '512'"),
        (config(num_attention_heads=-1), "num_attention_heads is -1"),
        (config(num_hidden_layers=...), "num_hidden_layers is missing"),
        (config(v_head_dim=...), "v_head_dim is missing"),
        (config(num_hidden_layers=1.5), "num_hidden_layers is 1.5"),
        (config(index_topk=1, index_head_dim=100), "multiple of 128"),
        (config(kv_lora_rank=float("nan")), "kv_lora_rank is nan"),
        (config(num_hidden_layers=10**30), "num_hidden_layers is 1000"),
        (config(num_hidden_layers=10**6 + 1), "from 1 to 1,000,000"),
        (config(linear_attn_config="x"), "full_attn_layers"),
        (config(linear_attn_config={}), "full_attn_layers"),
        (config(linear_attn_config={"full_attn_layers": []}), "full_attn_layers"),
        (config(linear_attn_config={"full_attn_layers": [1, 1]}), "full_attn_layers"),
        (config(linear_attn_config={"full_attn_layers": [62]}), "full_attn_layers"),
        (config(linear_attn_config={"full_attn_layers": [[]]}), "full_attn_layers"),
        (config(index_topk=1, index_head_dim=128, index_topk_freq=0), "index_topk_freq is 0"),
    ],
)
def test_a_config_that_is_no_mla_model_is_refused_in_one_line(bad, says):
    with pytest.raises(BadInput) as refused:
        models.load(bad)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2]", b"12", b'"x"', b"[" * 100_000])
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"config\.json"):
        models.load(str(path))


@given(
    key=st.sampled_from(
        [
            *config(),
            "text_config",
            "linear_attn_config",
            "index_topk",
            "index_topk_freq",
            "indexer_types",
            "layer_group_size",
            "compress_ratios",
            "n_group",
            "use_mla",
        ]
    ),
    value=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers(-2, 2**70) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=3,
    ),
    dsa=st.booleans(),
)
def test_no_value_of_a_config_does_more_than_be_refused(key, value, dsa):
    made = config(**({"index_topk": 2048, "index_head_dim": 128} if dsa else {})) | {key: value}
    refusal = ""
    try:
        geometry = models.load(made)
    except BadInput as e:
        refusal = str(e)
    if refusal:
        assert "\n" not in refusal
        assert len(refusal) < 400
    else:
        assert models.rank(geometry).layers == geometry.attention_layers > 0


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_python_writes_as_json_is_read(tmp_path, encoding):
    """json.dumps writes NaN and Infinity, and editors a byte-order mark."""
    text = json.dumps(config(router_bias=float("nan"), limit=float("inf")))
    (tmp_path / "config.json").write_text(text, encoding=encoding)
    assert models.load(tmp_path).latent_dim == 576


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-has-this-name/x", "./" + "b/" * 3000])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(BadInput, match="--model") as refused:
        models.load(name)
    assert "\n" not in str(refused.value)


def test_a_link_to_itself_and_a_folder_without_a_config_are_refused(tmp_path):
    (tmp_path / "config.json").symlink_to("config.json")
    (tmp_path / "empty" / "config.json").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "empty"):
        with pytest.raises(BadInput, match=r"no file .*config\.json"):
            models.load(path)


def test_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert models.load("~").latent_dim == models.load("~/config.json").latent_dim == 576


def test_every_mla_class_that_transformers_ships_is_read(tmp_path):
    """By its own file: no class with a latent rank is refused or read with another row than it says."""
    from transformers.models import auto

    read = {}
    for kind, class_name in auto.configuration_auto.CONFIG_MAPPING_NAMES.items():
        source = Path(transformers.__file__).parent / "models" / _module(kind)
        if not any("kv_lora_rank" in f.read_text() for f in source.glob("configuration_*.py")):
            continue
        shipped = getattr(transformers, class_name)()
        if getattr(shipped, "kv_lora_rank", None) is None:
            continue
        shipped.save_pretrained(tmp_path / kind)
        geometry = models.load(tmp_path / kind)
        read[kind] = geometry.attention_layers
        assert geometry.latent_dim == shipped.kv_lora_rank + shipped.qk_rope_head_dim, kind
        assert geometry.num_attention_heads == shipped.num_attention_heads, kind
    assert {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "longcat_flash",
        "mistral4",
        "youtu",
    } <= read.keys()
    assert (read["longcat_flash"], read["glm_moe_dsa"]) == (56, 78)


def _module(kind):
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return model_type_to_module_name(kind)


def test_unknown_names_get_the_nearest_presets_and_paths_are_named():
    with pytest.raises(BadInput, match=r"did you mean .*deepseek-v3"):
        models.load("deepseek-v33")
    with pytest.raises(BadInput, match=r"no file .*nowhere"):
        models.load("./nowhere")


@given(layers=st.integers(1, 200), pp=st.integers(1, 64))
def test_stages_cover_the_layers_in_order_and_differ_by_one(layers, pp):
    if pp > layers:
        with pytest.raises(BadInput, match="--pp"):
            models.pp_stages(layers, pp)
        return
    stages = models.pp_stages(layers, pp)
    assert [i for stage in stages for i in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes)
    assert max(sizes) - min(sizes) <= 1


@given(st.sampled_from(models.presets()), st.integers(1, 256), st.integers(1, 8))
def test_heads_divide_by_tp_and_the_latent_row_does_not(name, tp, pp):
    g = models.load(name)
    if g.num_attention_heads % tp:
        with pytest.raises(BadInput, match=f"--tp {tp}"):
            models.rank(g, tp=tp, pp=pp)
        return
    ranks = [models.rank(g, tp=tp, pp=pp, pp_rank=i) for i in range(pp)]
    assert all(r.heads * tp == g.num_attention_heads and r.geometry.latent_dim == g.latent_dim for r in ranks)
    assert sum(r.layers for r in ranks) == g.attention_layers
    shared = len(g.shared_indexer_layers) if g.has_indexer else g.attention_layers
    assert sum(r.full_indexer_layers for r in ranks) == g.attention_layers - shared
    assert models.rank(g, tp=tp, pp=pp).layers == max(r.layers for r in ranks)


def test_pp_partition_is_taken_as_given_or_refused():
    assert [len(s) for s in models.pp_stages(61, 4, partition=[15, 16, 15, 15])] == [15, 16, 15, 15]
    for wrong in ([61], [15, 15, 15, 15], [20, 20, 30, -9]):
        with pytest.raises(BadInput, match="--pp-partition"):
            models.pp_stages(61, 4, partition=wrong)


def test_models_need_neither_torch_nor_transformers():
    code = (
        "import sys, kvlab.memory as m, kvlab.models as k, kvlab.gpus as g; m.pool(k.load('glm-5'), 8);"
        "g.lookup('h200'); print({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
