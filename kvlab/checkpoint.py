"""A rank with its weights: the safetensors files that SGLang loads as it loads any model.

`--load-format dummy` fills weights with noise of its own in every process that it spawns. A checkpoint does
not: stock and patched servers, and both ranks of TP 2, read the very same seeded values through the real
loader.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.dummy import fill
from kvlab.errors import BadInput

INDEX = "model.safetensors.index.json"


def shapes(config: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of a DeepseekV3ForCausalLM's tensors as its checkpoints name them, a group a file.

    First the embeddings, the last norm and the head; then each layer; last the NextN layer where
    `num_nextn_predict_layers` is 1, under the number after the last.
    """
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    layers = config["num_hidden_layers"]
    for number in range(layers):
        yield _layer(config, number, is_dense=number < config["first_k_dense_replace"])
    for number in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        at = f"model.layers.{number}"
        yield {
            **_layer(config, number, is_dense=False),
            f"{at}.enorm.weight": (hidden,),
            f"{at}.hnorm.weight": (hidden,),
            f"{at}.eh_proj.weight": (hidden, 2 * hidden),
            f"{at}.shared_head.norm.weight": (hidden,),
        }


def nbytes(config: dict[str, Any]) -> int:
    """Bytes of all weights in BF16; the experts' score correction is float32."""
    return sum(
        math.prod(shape) * _itemsize(name) for group in shapes(config) for name, shape in group.items()
    )


def write_weights(folder: str | os.PathLike[str], *, seed: int = 0, device: str = "cpu") -> int:
    """Write seeded weights beside the config.json in `folder`; returns their bytes.

    Norms 1, biases 0, matrices N(0, 1/fan_in), each from a generator of its own on `device` (CPU and CUDA
    draw differently). The index is written last: without it the folder is no checkpoint. Raises BadInput
    where there is no config.json of a rank, or weights already.
    """
    import torch
    from safetensors.torch import save_file

    folder = Path(folder)
    config = _config(folder)
    if (folder / INDEX).exists():
        raise BadInput(f"{folder}: has weights already; name a new folder")
    groups = list(shapes(config))
    where: dict[str, str] = {}
    for number, group in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors = {}
        for name, shape in group.items():
            dtype = torch.float32 if _itemsize(name) == 4 else torch.bfloat16
            drawn = torch.empty(shape, dtype=dtype, device=device)
            fill(drawn, name, seed)
            tensors[name] = drawn.cpu()
            where[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    total = nbytes(config)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    part = folder / f".{INDEX}.part"
    part.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / INDEX)
    return total


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise BadInput(f"{path}: cannot be read ({e}); write a rank with `kvlab model dummy-rank`") from None
    if config.get("architectures") != ["DeepseekV3ForCausalLM"] or not config.get("q_lora_rank"):
        raise BadInput(f"{path}: not a rank of `kvlab model dummy-rank`, whose tensors are known")
    return config


def _itemsize(name: str) -> int:
    return 4 if name.endswith("e_score_correction_bias") else 2


def _layer(config: dict[str, Any], number: int, *, is_dense: bool) -> dict[str, tuple[int, ...]]:
    at = f"model.layers.{number}"
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
        f"{at}.self_attn.q_a_proj.weight": (q_rank, hidden),
        f"{at}.self_attn.q_a_layernorm.weight": (q_rank,),
        f"{at}.self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        f"{at}.self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        f"{at}.self_attn.kv_a_layernorm.weight": (kv_rank,),
        f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        f"{at}.self_attn.o_proj.weight": (hidden, heads * value),
    }
    if is_dense:
        return {**found, **_mlp(f"{at}.mlp", hidden, config["intermediate_size"])}
    width, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    found[f"{at}.mlp.gate.weight"] = (experts, hidden)
    found[f"{at}.mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        found |= _mlp(f"{at}.mlp.experts.{expert}", hidden, width)
    if shared := config["n_shared_experts"]:
        found |= _mlp(f"{at}.mlp.shared_experts", hidden, width * shared)
    return found


def _mlp(at: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (width, hidden),
        f"{at}.up_proj.weight": (width, hidden),
        f"{at}.down_proj.weight": (hidden, width),
    }
