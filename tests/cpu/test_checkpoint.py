"""A rank's own safetensors: the names and shapes that the model's code has, seeded, whole or none."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kvlab import checkpoint, dummy, models
from kvlab.errors import BadInput

SMALL = {
    "hidden_size": 64,
    "vocab_size": 96,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def config(**changed):
    return dummy.rank_config(models.load("glm-5"), layers=4) | SMALL | changed


def every(its):
    return {name: shape for group in checkpoint.shapes(its) for name, shape in group.items()}


def test_names_and_shapes_are_those_of_the_models_code():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    its = config()
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **{k: v for k, v in its.items() if k in SMALL}
                | {
                    k: its[k]
                    for k in ("first_k_dense_replace", "n_group", "topk_group", "num_experts_per_tok")
                }
                | {"n_shared_experts": 1}
            )
        )
    theirs = {name: tuple(t.shape) for name, t in model.state_dict().items() if ".mlp." not in name}
    ours = {name: shape for name, shape in every(its).items() if ".mlp." not in name}
    assert ours == theirs


def test_the_files_hold_what_the_index_says_and_repeat_themselves(tmp_path):
    sizes = []
    for name in ("a", "b"):
        dummy.write_rank(tmp_path / name, config())
        sizes.append(checkpoint.write_weights(tmp_path / name, seed=3))
    index = json.loads((tmp_path / "a" / checkpoint.INDEX).read_text())
    assert set(index["weight_map"]) == set(every(config()))
    held = 0
    for file in sorted(set(index["weight_map"].values())):
        a, b = (load_file(tmp_path / name / file) for name in ("a", "b"))
        assert {n for n, f in index["weight_map"].items() if f == file} == set(a)
        for name, tensor in a.items():
            assert torch.equal(tensor, b[name])
            assert tuple(tensor.shape) == every(config())[name]
            held += tensor.nbytes
            if tensor.dim() == 2:
                assert 0.5 < tensor.float().std() * tensor.shape[1] ** 0.5 < 1.5
    assert sizes == [held, held] == [index["metadata"]["total_size"]] * 2


def test_a_nextn_layer_comes_after_the_last():
    plain, with_draft = every(config()), every(config(num_nextn_predict_layers=1))
    more = set(with_draft) - set(plain)
    assert {n.split(".")[2] for n in more} == {"4"}
    assert "model.layers.4.eh_proj.weight" in more


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(BadInput, match="dummy-rank"):
        checkpoint.write_weights(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    with pytest.raises(BadInput, match="not a rank"):
        checkpoint.write_weights(tmp_path)
    dummy.write_rank(tmp_path / "r", config())
    checkpoint.write_weights(tmp_path / "r")
    with pytest.raises(BadInput, match="has weights already"):
        checkpoint.write_weights(tmp_path / "r")
