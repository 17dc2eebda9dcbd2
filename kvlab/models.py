"""What shape is this model? MLA geometry from a config.json or a preset, and one rank's share."""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvlab.errors import BadInput

# Architectures whose checkpoints may carry a DSA indexer (SGLang 0.5.15.post1, configs/model_config.py).
_DSA = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLMNextN",
        "GlmMoeDsaForCausalLM",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
    }
)
# Where multi-modal configs keep the language model, in the order in which SGLang prefers them.
_NESTED = ("llm_config", "language_config", "text_config")
# What a config.json may leave to its class (transformers 5.12.1, GlmMoeDsaConfig and DeepseekV32Config).
_CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "glm_moe_dsa": {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32},
    "deepseek_v32": {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
}
# More than any model has of anything; a file that says more is damaged, and ranges over it would not end.
_MOST = 10**6
# One FP32 scale for each 128 values of an indexer row (SGLang 0.5.9 to 0.5.23, quant_block_size of the DSA
# pool).
INDEXER_QUANT_BLOCK = 128


class MlaGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model with multi-head latent attention, whole (not per rank). Names are config.json's.

    `attention_layers` counts the layers that keep a latent row for each token: `num_hidden_layers` for most,
    twice that for LongCat-Flash, fewer for hybrids. `sources` says for each field where its value is from.
    """

    name: str
    attention_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    first_k_dense_replace: int | None = None
    n_group: int | None = None
    topk_group: int | None = None
    index_topk: int | None = None
    index_head_dim: int | None = None
    index_n_heads: int | None = None
    shared_indexer_layers: tuple[int, ...] = ()
    num_nextn_predict_layers: int = 0
    architecture: str | None = None
    sources: dict[str, str] = {}

    @property
    def latent_dim(self) -> int:
        """Elements of one token's row in one layer: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def has_indexer(self) -> bool:
        """Whether the model has DeepSeek Sparse Attention, and so an indexer row beside each latent row."""
        return self.index_head_dim is not None

    @property
    def indexer_row_bytes(self) -> int:
        """Bytes of one token's indexer row in one layer, FP8 values and an FP32 scale a block.

        0 without DSA.
        """
        if self.index_head_dim is None:
            return 0
        return self.index_head_dim + self.index_head_dim // INDEXER_QUANT_BLOCK * 4

    @property
    def sm_scale(self) -> float:
        """Softmax scale before any YaRN correction: 1/sqrt(qk_nope_head_dim + qk_rope_head_dim)."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds: heads divide by TP, the latent rows do not, PP splits layers.

    `first_layer` and `end_layer` bound the rank's attention layers, the end exclusive.
    """

    geometry: MlaGeometry
    tp: int
    pp: int
    pp_rank: int
    heads: int
    first_layer: int
    end_layer: int

    @property
    def layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def full_indexer_layers(self) -> int:
        """The rank's layers that run an indexer of their own and do not reuse an earlier layer's top-k."""
        if not self.geometry.has_indexer:
            return 0
        shared = sum(self.first_layer <= i < self.end_layer for i in self.geometry.shared_indexer_layers)
        return self.layers - shared


def load(model: str | os.PathLike[str] | Mapping[str, Any]) -> MlaGeometry:
    """Geometry from a preset's name, a config.json, the folder that holds it, or its decoded dict.

    A preset's name wins over a folder of the same name; write `./glm-5` for the folder. Raises BadInput for
    an unknown name (with the nearest ones), a missing file, JSON that is no config and a model without MLA.
    """
    if isinstance(model, Mapping):
        return from_config(model)
    text = os.fspath(model)
    preset = _preset_key(text) if isinstance(model, str) else None
    if preset is not None:
        return _preset(preset)
    try:
        path = Path(text).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as e:
        # A name longer than the system takes, or the home of a user that there is not.
        reason = e.strerror if isinstance(e, OSError) else e
        raise BadInput(
            f"--model: {text[:50]}{'…' if text[50:] else ''} is neither a preset nor a path: {reason}"
        ) from None
    if exists or not isinstance(model, str) or _looks_like_path(text):
        return from_config(_read_config(path), name=_config_name(path))
    raise BadInput(
        f"--model: no preset is called {text!r}{_suggest(text, presets())}; presets are "
        f"{', '.join(presets())}, or give the path of a config.json"
    )


def presets() -> list[str]:
    """Names of the models that need no config.json."""
    return list(_presets())


def from_config(config: Mapping[str, Any], *, name: str = "config", source: str | None = None) -> MlaGeometry:
    """Geometry from a decoded config.json; a nested language model (`text_config` and the like) is found.

    `source` is what `sources` says for each value; the config's name by default. Raises BadInput.
    """
    text = _language_model(config, name)
    origin = source or f"config.json of {name}"
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(
        key: str, *, required: bool = False, zero: bool = False, default: int | None = None
    ) -> int | None:
        value = text.get(key)
        said = origin
        if value is None:
            if required:
                raise BadInput(f"{name}: {key} is missing; an MLA model's config.json has it")
            value, said = default, f"default of the {_model_type(text)} class in transformers 5.12.1"
        if value is None:
            return None
        sources[key] = said
        return _whole(value, f"{name}: {key}", least=0 if zero else 1)

    for key in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        values[key] = take(key, required=True, zero=key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    for key in (
        "q_lora_rank",
        "hidden_size",
        "vocab_size",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
    ):
        values[key] = take(key)
    for key in ("n_shared_experts", "first_k_dense_replace"):
        values[key] = take(key, zero=True)
    values["num_nextn_predict_layers"] = take("num_nextn_predict_layers", zero=True) or 0

    values["attention_layers"] = _attention_layers(text, name, take)
    sources["attention_layers"] = origin
    architecture = _architecture(config, text)
    if _is_dsa(architecture, text):
        defaults = _CLASS_DEFAULTS.get(_model_type(text), {})
        values["index_head_dim"] = take(
            "index_head_dim", required=not defaults, default=defaults.get("index_head_dim")
        )
        for key in ("index_topk", "index_n_heads"):
            values[key] = take(key, default=defaults.get(key))
        if values["index_head_dim"] % INDEXER_QUANT_BLOCK:
            raise BadInput(
                f"{name}: index_head_dim is {values['index_head_dim']}; it must be a "
                f"multiple of {INDEXER_QUANT_BLOCK}"
            )
        values["shared_indexer_layers"] = _shared_indexer_layers(text, values["attention_layers"], name)
    return MlaGeometry(name=name, architecture=architecture, sources=sources, **values)


def rank(
    geometry: MlaGeometry,
    *,
    tp: int = 1,
    pp: int = 1,
    pp_rank: int | None = None,
    partition: Sequence[int] | None = None,
) -> Rank:
    """The share of one rank; without `pp_rank` that of the stage with the most layers.

    `partition` is SGLANG_PP_LAYER_PARTITION: layers a stage. Raises BadInput where heads do not divide by
    `tp` or there are more stages than layers.
    """
    _positive("--tp", tp)
    heads, left = divmod(geometry.num_attention_heads, tp)
    if left:
        fits = [
            n for n in range(1, geometry.num_attention_heads + 1) if geometry.num_attention_heads % n == 0
        ]
        raise BadInput(
            f"--tp {tp}: {geometry.num_attention_heads} heads of {geometry.name} do not divide by it; "
            f"use one of {', '.join(map(str, fits))}"
        )
    stages = pp_stages(geometry.attention_layers, pp, partition=partition)
    if pp_rank is None:
        pp_rank = max(range(pp), key=lambda i: len(stages[i]))
    if not 0 <= pp_rank < pp:
        raise BadInput(f"--pp-rank {pp_rank}: with --pp {pp} it is 0 to {pp - 1}")
    stage = stages[pp_rank]
    return Rank(
        geometry=geometry,
        tp=tp,
        pp=pp,
        pp_rank=pp_rank,
        heads=heads,
        first_layer=stage.start,
        end_layer=stage.stop,
    )


def pp_stages(layers: int, pp: int, *, partition: Sequence[int] | None = None) -> list[range]:
    """Layers of each pipeline stage as SGLang splits them: the last `layers % pp` stages get one more.

    get_pp_indices, the same in 0.5.9, 0.5.15.post1 and 0.5.23.
    """
    _positive("--pp", pp)
    if pp > layers:
        raise BadInput(f"--pp {pp}: the model has {layers} attention layers; use at most that many stages")
    if partition is None:
        base, extra = divmod(layers, pp)
        partition = [base + (i >= pp - extra) for i in range(pp)]
    if len(partition) != pp or sum(partition) != layers or min(partition) < 0:
        raise BadInput(
            f"--pp-partition {','.join(map(str, partition))}: it must name {pp} stages that add up to "
            f"{layers} layers"
        )
    starts = [sum(partition[:i]) for i in range(pp)]
    return [range(start, start + n) for start, n in zip(starts, partition, strict=True)]


@cache
def _presets() -> dict[str, dict[str, Any]]:
    text = resources.files("kvlab").joinpath("presets/models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _preset_key(name: str) -> str | None:
    wanted = name.strip().lower()
    for key, entry in _presets().items():
        if wanted in (key, entry["repository"].lower(), *(a.lower() for a in entry.get("aliases", ()))):
            return key
    return None


@cache
def _preset(key: str) -> MlaGeometry:
    entry = _presets()[key]
    geometry = from_config(entry["values"], name=key, source=entry["source"])
    own = entry.get("sources", {})
    sources = {field: own.get(field, said) for field, said in geometry.sources.items()}
    return msgspec.structs.replace(geometry, sources=sources)


def _suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _looks_like_path(text: str) -> bool:
    return text.endswith(".json") or text.startswith((".", "~")) or os.path.isabs(text)


def _config_name(path: Path) -> str:
    path = path / "config.json" if path.is_dir() else path
    return path.parent.name or path.name if path.name == "config.json" else path.name


def _read_config(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise BadInput(f"--model: no file {path}; give a config.json, its folder or a preset's name")
    try:
        # The standard library's reader: like transformers, which writes NaN and Infinity, it takes them.
        config = json.loads(path.read_bytes())
    except OSError as e:
        raise BadInput(f"--model: {path} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise BadInput(f"--model: {path} is not JSON: {e}; give a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise BadInput(f"--model: {path} holds a {type(config).__name__}, a config.json holds an object")
    return config


def _language_model(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    nested = (config.get(key) for key in _NESTED)
    for text in (*(n for n in nested if isinstance(n, Mapping)), config):
        if text.get("kv_lora_rank") is not None and text.get("use_mla", True) is not False:
            return text
    if not any(key in config for key in ("model_type", "architectures", *_NESTED, "num_hidden_layers")):
        raise BadInput(f"{name}: no model's config (it names no model_type and no architectures)")
    what = _architecture(config, config) or config.get("model_type") or "the model"
    raise BadInput(
        f"{name}: {what} has no multi-head latent attention (no kv_lora_rank); kvlab covers MLA models, "
        f"such as {', '.join(presets()[:4])}"
    )


def _architecture(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    for where in (config, text):
        names = where.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
    return None


def _is_dsa(architecture: str | None, text: Mapping[str, Any]) -> bool:
    if architecture is not None and architecture not in _DSA:
        return False
    return text.get("index_topk") is not None or _model_type(text) in _CLASS_DEFAULTS


def _model_type(text: Mapping[str, Any]) -> str:
    """`model_type`, "" where the file leaves it out."""
    kind = text.get("model_type")
    return kind if isinstance(kind, str) else ""


def _attention_layers(text: Mapping[str, Any], name: str, take: Any) -> int:
    """Layers that keep a latent row, by model type."""
    kind = _model_type(text)
    if "compress_ratios" in text or ("layer_group_size" in text and text["layer_group_size"] != 1):
        raise BadInput(
            f"{name}: {kind or 'the model'} mixes MLA with other attention in a way kvlab does not count; "
            "it counts models whose layers are all MLA, Kimi-Linear and LongCat-Flash"
        )
    if kind.startswith("longcat_flash"):
        # Two attention blocks a layer: SGLang's num_attention_layers is twice num_hidden_layers.
        return 2 * take("num_layers", required=True)
    layers = take("num_hidden_layers", required=True)
    hybrid = text.get("linear_attn_config")
    if hybrid is None:
        return layers
    # Kimi-Linear: only the full-attention layers, numbered from 1, have a latent pool.
    full = hybrid.get("full_attn_layers") if isinstance(hybrid, Mapping) else None
    numbers = {i for i in full if type(i) is int and 1 <= i <= layers} if isinstance(full, list) else set()
    if not numbers or len(numbers) < len(full):
        raise BadInput(
            f"{name}: linear_attn_config must list full_attn_layers, distinct numbers from 1 to {layers}"
        )
    return len(full)


def _shared_indexer_layers(text: Mapping[str, Any], layers: int, name: str) -> tuple[int, ...]:
    """Layers that reuse an earlier layer's top-k: SGLang 0.5.23's rule, dsa_layer_skips_topk."""
    types = text.get("indexer_types")
    if isinstance(types, list):
        return tuple(i for i, kind in enumerate(types[:layers]) if kind == "shared")
    pattern = text.get("index_topk_pattern")
    if isinstance(pattern, str):
        return tuple(i for i, kind in enumerate(pattern[:layers]) if kind == "S")
    freq, offset = text.get("index_topk_freq"), text.get("index_skip_topk_offset")
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset
    for key, value in (("index_topk_freq", freq), ("index_skip_topk_offset", offset)):
        _whole(value, f"{name}: {key}")
    return tuple(i for i in range(layers) if max(i - offset + 1, 0) % freq)


def _whole(value: Any, what: str, *, least: int = 1) -> int:
    """`value` if it is a whole number from `least` to _MOST; raises BadInput."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:50]}…"
        raise BadInput(f"{what} is {shown}; it must be a whole number from {least} to {_MOST:,}")
    return value


def _positive(option: str, value: int) -> None:
    if value < 1:
        raise BadInput(f"{option} {value}: it must be at least 1")
