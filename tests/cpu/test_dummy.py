"""Dummy ranks: the folder that SGLang serves, and weights under which a cache matters."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from kvlab import cli, dummy, models
from kvlab.errors import BadInput


@pytest.mark.parametrize(
    ("model", "heads", "layers", "vocabulary"), [("glm-5", 8, 78, 19360), ("deepseek-v3", 16, 61, 16160)]
)
def test_transformers_loads_the_rank(tmp_path, model, heads, layers, vocabulary):
    folder = dummy.write_rank(tmp_path / "rank", dummy.rank_config(models.load(model), tp=8, experts=32))
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["DeepseekV3ForCausalLM"]
    assert (config.num_attention_heads, config.num_hidden_layers, config.vocab_size) == (
        heads,
        layers,
        vocabulary,
    )
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.n_routed_experts) == (512, 64, 32)
    assert config.dtype == torch.bfloat16
    assert config.rope_parameters["rope_type"] == "default"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == vocabulary
    assert tokenizer("w3 w500 nonsense")["input_ids"] == [3, 500, tokenizer.unk_token_id]
    assert tokenizer.decode([3, 500, vocabulary - 1]) == f"w3 w500 w{vocabulary - 1}"
    assert (
        (tokenizer.bos_token_id, tokenizer.eos_token_id)
        == (config.bos_token_id, config.eos_token_id)
        == (0, 1)
    )
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "w7"}], tokenize=False)
    assert tokenizer(chat)["input_ids"] == [7]


def test_the_rank_has_the_recorded_shape():
    """recorded/h200-stock: 8 of 64 heads, 32 experts of 256; its trace's MoE grids give 256 of 2048 wide."""
    c = dummy.rank_config(models.load("glm-5"))
    assert (c["hidden_size"], c["q_lora_rank"], c["qk_nope_head_dim"], c["v_head_dim"]) == (
        6144,
        2048,
        192,
        256,
    )
    assert (c["first_k_dense_replace"], c["num_experts_per_tok"], c["n_shared_experts"]) == (3, 8, 1)
    assert (c["moe_intermediate_size"], c["intermediate_size"], c["n_routed_experts"]) == (256, 1536, 32)
    assert "index_topk" not in c
    # What it serves is the geometry that kvlab computes with.
    g = models.from_config(c)
    assert (g.latent_dim, g.attention_layers, g.has_indexer) == (576, 78, False)


def test_expert_groups_stay_where_they_work():
    v3 = models.load("deepseek-v3")
    kept = dummy.rank_config(v3, experts=32)
    assert (kept["n_group"], kept["topk_group"]) == (8, 4)
    few = dummy.rank_config(v3, experts=8)
    assert (few["n_group"], few["topk_group"]) == (1, 1)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("glm-5", {"tp": 5}, "--tp 5"),
        ("glm-5", {"experts": 7}, "--experts 7"),
        ("glm-5", {"experts": 257}, "--experts 257"),
        ("glm-5", {"layers": 79}, "--layers 79"),
        ("glm-5", {"layers": 0}, "--layers 0"),
        ("deepseek-v2", {}, "intermediate_size"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(model, options, says):
    with pytest.raises(BadInput, match=says):
        dummy.rank_config(models.load(model), **options)


def test_writing_is_all_or_nothing(tmp_path):
    config = dummy.rank_config(models.load("glm-5"), layers=2)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    with pytest.raises(BadInput, match="not an empty folder"):
        dummy.write_rank(taken, config)
    with pytest.raises(ValueError, match="JSON compliant"):
        dummy.write_rank(tmp_path / "bad", config | {"rope_theta": float("nan")})
    with pytest.raises(BadInput, match="cannot be written"):
        dummy.write_rank(taken / "file" / "below", config)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "empty").mkdir()
    dummy.write_rank(tmp_path / "empty", config)
    assert json.loads((tmp_path / "empty" / "config.json").read_text())["num_hidden_layers"] == 2


def test_on_the_command_line(tmp_path, capsys):
    args = ["model", "dummy-rank", "glm-5", "--out", str(tmp_path / "rank"), "--layers", "3", "--json"]
    with pytest.raises(SystemExit) as done:
        cli.main(args)
    assert done.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["config"] == json.loads((tmp_path / "rank" / "config.json").read_text())
    with pytest.raises(SystemExit) as done:
        cli.main(args)
    assert done.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(64)
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64, bias=False)
        self.experts = torch.nn.Parameter(torch.zeros(4, 32, 64))
        self.e_score_correction_bias = torch.nn.Parameter(torch.ones(4))
        self.derived = None

    def post_load_weights(self):
        self.derived = self.up.weight.detach().clone()


def model(*, extra=False):
    layers = [Layer().to(torch.bfloat16) for _ in range(2)]
    # SGLang's own filling: everything, norms too, within +-1e-3.
    made = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    if extra:
        made["other"] = torch.nn.Linear(8, 8)
    for parameter in made.parameters():
        torch.nn.init.uniform_(parameter, -1e-3, 1e-3)
    return made


def test_weights_have_the_scale_that_keeps_hidden_states():
    m = model()
    assert dummy.reinitialise(m, seed=1) == 12
    layer = m["layers"][0]
    assert torch.equal(layer.norm.weight, torch.ones_like(layer.norm.weight))
    assert not layer.up.bias.any()
    assert not layer.e_score_correction_bias.any()
    for weight in (layer.up.weight, layer.down.weight, layer.experts):
        assert weight.float().std().item() * weight.shape[-1] ** 0.5 == pytest.approx(1, rel=0.05)
        assert abs(weight.float().mean().item()) < 0.05
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    assert 0.3 < layer.down(layer.up(layer.norm(x))).float().std() < 3


def test_weights_depend_on_seed_and_name_and_nothing_else():
    a, b, c, bigger = model(), model(), model(), model(extra=True)
    torch.manual_seed(5)
    dummy.reinitialise(a, seed=1)
    torch.manual_seed(6)
    dummy.reinitialise(b, seed=1)
    dummy.reinitialise(c, seed=2)
    dummy.reinitialise(bigger, seed=1)
    state = torch.get_rng_state()
    dummy.reinitialise(b, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in a.named_parameters():
        assert torch.equal(parameter, b.get_parameter(name)), name
        assert torch.equal(parameter, bigger.get_parameter(name)), name
    one = "layers.0.up.weight"
    assert not torch.equal(a.get_parameter(one), c.get_parameter(one))
    assert not torch.equal(a.get_parameter(one), a.get_parameter("layers.1.up.weight"))


def test_what_is_derived_from_weights_is_derived_again():
    layer = Layer()
    dummy.reinitialise(layer, seed=3, derived=False)
    assert layer.derived is None
    dummy.reinitialise(layer, seed=3)
    assert torch.equal(layer.derived, layer.up.weight)


def test_quantised_parameters_are_refused():
    m = torch.nn.Module()
    m.weight = torch.nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"weight is torch\.float8_e4m3fn"):
        dummy.reinitialise(m)
