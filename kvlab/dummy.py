"""A rank without its weights: a folder that SGLang serves with `--load-format dummy`, and seeded weights.

The folder has the shape of one tensor-parallel rank, so that one card does one rank's work: the heads, the
widths of the dense and expert MLPs and the vocabulary are divided by TP, the latent cache is not, and only a
few of the experts are kept. SGLang fills dummy weights from +-1e-3, norms too: hidden states vanish, the FP8
rows come out all zero and any two runs agree. `reinitialise` gives weights under which tokens depend on the
cache.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import outputs
from kvlab.errors import BadInput
from kvlab.models import MlaGeometry, rank

if TYPE_CHECKING:
    import torch

_NEEDED = ("hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts")
_SPECIAL = ("<s>", "</s>", "<unk>")


def rank_config(
    geometry: MlaGeometry,
    *,
    tp: int = 8,
    experts: int = 32,
    layers: int | None = None,
    max_position_embeddings: int = 202752,
) -> dict[str, Any]:
    """config.json of one TP rank of `geometry`, as a dense DeepseekV3ForCausalLM.

    That architecture takes any MLA geometry and casts its pool. A DSA indexer is left out: with one, SGLang
    serves the model through other backends. `experts` of the routed ones are kept, `layers` of all. Raises
    BadInput where the shape does not divide by `tp`.
    """
    missing = [key for key in _NEEDED if getattr(geometry, key) is None]
    if missing:
        raise BadInput(
            f"--model: {geometry.name} does not say its {', '.join(missing)}; give its config.json"
        )
    one = rank(geometry, tp=tp)
    layers = geometry.attention_layers if layers is None else layers
    if not 1 <= layers <= geometry.attention_layers:
        raise BadInput(f"--layers {layers}: {geometry.name} has {geometry.attention_layers}")
    top_k = geometry.num_experts_per_tok or 1
    if not top_k <= experts <= (geometry.n_routed_experts or 0):
        raise BadInput(
            f"--experts {experts}: each token goes to {top_k} of {geometry.n_routed_experts}; give a number "
            "between"
        )
    groups, kept_groups = _expert_groups(geometry, experts, top_k)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": _divide(geometry, "vocab_size", tp),
        "hidden_size": geometry.hidden_size,
        "intermediate_size": _divide(geometry, "intermediate_size", tp),
        "moe_intermediate_size": _divide(geometry, "moe_intermediate_size", tp),
        "num_hidden_layers": layers,
        "num_attention_heads": one.heads,
        "num_key_value_heads": one.heads,
        "q_lora_rank": geometry.q_lora_rank,
        "kv_lora_rank": geometry.kv_lora_rank,
        "qk_nope_head_dim": geometry.qk_nope_head_dim,
        "qk_rope_head_dim": geometry.qk_rope_head_dim,
        "v_head_dim": geometry.v_head_dim,
        "n_routed_experts": experts,
        "n_shared_experts": geometry.n_shared_experts if geometry.n_shared_experts is not None else 1,
        "num_experts_per_tok": top_k,
        "first_k_dense_replace": min(geometry.first_k_dense_replace or 0, layers),
        "moe_layer_freq": 1,
        "n_group": groups,
        "topk_group": kept_groups,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "kvlab_rank_of": f"{geometry.name}, TP {tp}, {experts} of {geometry.n_routed_experts} experts",
    }


def write_rank(folder: str | os.PathLike[str], config: dict[str, Any]) -> Path:
    """Write config.json and a word-level tokenizer of its vocabulary size to `folder`, all or nothing.

    Each token is a word: `<s>`, `</s>`, `<unk>`, then `w3`, `w4`, …; words outside become `<unk>`. Raises
    BadInput where `folder` exists and is not an empty folder, or cannot be written.
    """
    folder = Path(folder)
    with outputs.new_folder("--out", folder) as made:
        for name, content in _files(config).items():
            text = json.dumps(content, indent=1, allow_nan=False) + "\n"
            outputs.write("--out", made / name, text)
    return folder


def reinitialise(model: "torch.nn.Module", *, seed: int = 0, derived: bool = True) -> int:
    """Give every parameter of `model` a seeded value in place; returns how many there were.

    Norms (one dimension) become 1, biases 0, matrices N(0, 1/fan_in) with fan_in the last dimension. Each
    draws from a generator of its own, seeded by `seed` and the parameter's name, on the parameter's device:
    so stock and patched runs agree, and every TP rank has the same replicated weights, whatever else the
    model holds. CPU and CUDA draw differently. `derived` then calls the model's `post_load_weights` if it
    has one, because SGLang's MLA layers keep `w_kc` and `w_vc`, which it computes from `kv_b_proj` after
    loading. Raises ValueError for a parameter that is quantised or not floating: initialise before
    quantisation (`seeded_dummy_weights`).
    """
    import torch

    count = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.element_size() < 2:
                raise ValueError(
                    f"{name} is {parameter.dtype}; seeded weights need 16 bits or more, floating"
                )
            fill(parameter, name, seed)
            count += 1
    post = getattr(model, "post_load_weights", None)
    if derived and callable(post):
        post()
    return count


@contextlib.contextmanager
def seeded_dummy_weights(seed: int = 0) -> Iterator[None]:
    """Within it, SGLang's `--load-format dummy` fills weights with `reinitialise` (this process only).

    It stands in for `initialize_dummy_weights` of sglang.srt.model_loader.loader, which runs before `w_kc`
    and `w_vc` are derived and before weights are quantised; the name is the same in 0.5.9, 0.5.15.post1 and
    0.5.23.
    """
    from sglang.srt.model_loader import loader

    stock: Callable[..., None] = loader.initialize_dummy_weights

    def seeded(model: "torch.nn.Module", *_: object, **__: object) -> None:
        reinitialise(model, seed=seed, derived=False)

    loader.initialize_dummy_weights = seeded
    try:
        yield
    finally:
        loader.initialize_dummy_weights = stock


def fill(parameter: "torch.Tensor", name: str, seed: int) -> None:
    """Fill in place: norms 1, biases 0, matrices N(0, 1/fan_in) from `seed` and the parameter's name."""
    import torch

    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.dim() < 2:
        parameter.fill_(1)
    else:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)


def _divide(geometry: MlaGeometry, key: str, tp: int) -> int:
    width, left = divmod(getattr(geometry, key), tp)
    if left:
        raise BadInput(f"--tp {tp}: {key} {getattr(geometry, key)} of {geometry.name} does not divide by it")
    return width


def _expert_groups(geometry: MlaGeometry, experts: int, top_k: int) -> tuple[int, int]:
    """The model's expert groups where they still work with fewer experts, else one group of all."""
    groups, kept = geometry.n_group or 1, geometry.topk_group or 1
    if experts % groups or kept > groups or experts // groups * kept < top_k:
        return 1, 1
    return groups, kept


def _files(config: dict[str, Any]) -> dict[str, Any]:
    words = [*_SPECIAL, *(f"w{i}" for i in range(len(_SPECIAL), config["vocab_size"]))]
    special = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(_SPECIAL)
    ]
    return {
        "config.json": config,
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {w: i for i, w in enumerate(words)},
                "unk_token": "<unk>",
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "</s>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        },
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False},
    }
