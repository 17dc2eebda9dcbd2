"""What is DeepSeek Sparse Attention in an SGLang release? Its models, sub-backends, their rows, its pages."""

from __future__ import annotations

import ast
import re
from typing import Any

from kvlab.backends import probe
from kvlab.backends.extract_sglang_defaults import default_kv_dtype, sub_defaults
from kvlab.backends.extract_sglang_files import ATTENTION, SRT, choices, file_of, override_files
from kvlab.backends.sources import Module, Tree


def sparse(tree: Tree, args: Module, config: Module) -> dict[str, Any]:
    """DeepSeek Sparse Attention: who has it, its sub-backends, their rows, the pool's page size."""
    name = "dsa" if config.function("is_deepseek_dsa") else "nsa"
    function = config.function(f"is_deepseek_{name}")
    literal = next(n for n in ast.walk(function) if isinstance(n, ast.List | ast.Tuple) and len(n.elts) > 2)
    facts: dict[str, Any] = {
        "name": name,
        "architectures": {
            "value": probe.constants(literal),
            **config.quote(function),
            "quote": f"def {function.name}",
        },
        "choices": _dsa_choices(tree, name),
        "pool_page": _pool_page(tree),
        "sets_page": _sets_page(tree),
        "skips_indexer": _skips_indexer(tree),
        "default_backend": _default_dsa(tree, name),
    }
    facts["rows"] = _rows(tree, name, facts["choices"]["value"])
    facts["defaults"] = {
        "GlmMoeDsaForCausalLM": sub_defaults(tree, name, "GlmMoeDsaForCausalLM"),
        "*": sub_defaults(tree, name, "DeepseekV32ForCausalLM"),
    }
    facts["default_kv_dtype"] = default_kv_dtype(tree, name)
    facts["quantizes_pool"] = _quantizes_pool(tree)
    facts["serves"] = {phase: _serves(tree, phase) for phase in ("decode", "extend")}
    facts["wants_dsa"] = _wants_dsa(tree)
    facts["trtllm_gen"] = _trtllm_gen(tree)
    facts["sparse_sm120"] = _flashinfer_sparse(tree)
    return facts


def _dsa_choices(tree: Tree, name: str) -> dict[str, Any]:
    found = choices(tree, "DSA_CHOICES", "NSA_CHOICES")
    if found is None:
        # From 0.5.19 the choices stand in the argument's own declaration.
        for module in (
            *tree.modules(f"{SRT}/arg_groups/fields/*.py"),
            *tree.modules(f"{SRT}/server_args.py"),
            *tree.modules(f"{SRT}/arg_groups/*.py"),
        ):
            for node in ast.walk(module.ast):
                if isinstance(node, ast.List) and {"flashmla_sparse", "trtllm"} <= set(probe.constants(node)):
                    return {
                        "value": probe.constants(node),
                        "file": module.rel,
                        "line": node.lineno,
                        "quote": "choices",
                    }
        raise LookupError(f"sglang {tree.release}: the {name} sub-backends are not where they were")
    return found


def _pool_page(tree: Tree) -> dict[str, Any]:
    """The pool's own assertion: any other page size dies here, whatever the backend takes."""
    module = tree.module(f"{SRT}/mem_cache/memory_pool.py")
    for cls in ("DSATokenToKVPool", "NSATokenToKVPool"):
        init = module.function("__init__", cls)
        for node in ast.walk(init) if init else []:
            if isinstance(node, ast.Assert) and re.fullmatch(
                r"(self|physical)[._]page_size == 64", ast.unparse(node.test)
            ):
                return {"value": 64, "class": cls, **module.quote(node)}
    raise LookupError(f"sglang {tree.release}: the DSA pool's page-size assertion is not where it was")


def _sets_page(tree: Tree) -> dict[str, Any] | None:
    for module in override_files(tree):
        for node in ast.walk(module.ast) if module else []:
            if isinstance(node, ast.Call):
                said = probe.message(node)
                if said.startswith("Setting page size to ") and "for DeepSeek DSA." in said:
                    return module.quote(node)
    return None


def _skips_indexer(tree: Tree) -> dict[str, Any] | None:
    """A backend without indexer metadata makes the indexer return None: attention is then dense."""
    module = tree.module(f"{ATTENTION}/dsa/dsa_indexer.py", f"{ATTENTION}/nsa/nsa_indexer.py")
    for branch in probe.ifs(module.ast) if module else []:
        if ast.unparse(branch.test) == "metadata is None" and isinstance(branch.body[0], ast.Return):
            return {**module.quote(branch), "quote": "if metadata is None: return None"}
    return None


def _default_dsa(tree: Tree, name: str) -> dict[str, Any] | None:
    for module in override_files(tree):
        for node in ast.walk(module.ast) if module else []:
            if isinstance(
                node, ast.Call
            ) and f"Use {name} attention backend for DeepSeek with DSA" in probe.message(node):
                return {"backend": name, **module.quote(node)}
    return None


def _rows(tree: Tree, name: str, choices: list[str]) -> dict[str, Any]:
    """Bytes of one FP8 row by sub-backend, from the release's own calculate_mla_kv_cache_dim."""
    module = tree.module(f"{SRT}/mem_cache/kv_cache_configurator.py")
    if module is None or module.function("calculate_mla_kv_cache_dim") is None:
        module = tree.module(f"{SRT}/model_executor/model_runner_kv_cache_mixin.py")
    node = module.function("calculate_mla_kv_cache_dim") if module else None
    if node is None:
        # 0.5.8: the pool itself widens every FP8 row, whatever reads it.
        module = tree.module(f"{SRT}/mem_cache/memory_pool.py")
        init = module.function("__init__", "NSATokenToKVPool")
        wide = next(
            n
            for n in ast.walk(init)
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "override_dim"
        )
        return {"value": dict.fromkeys(choices, 512 + 512 // 128 * 4 + 64 * 2), **module.quote(wide)}
    found = {c: _run_rows(module, name, c) for c in choices}
    return {"value": found, **module.quote(node), "quote": "def calculate_mla_kv_cache_dim"}


def _run_rows(module: Module, name: str, sub: str) -> int:
    config = probe.Stub(hf_config=None, kv_lora_rank=512, qk_rope_head_dim=64)
    args = probe.Stub(**{f"{name}_prefill_backend": sub, f"{name}_decode_backend": sub})
    pool = probe.Stub(quant_block_size=128, rope_storage_dtype=probe.Stub(itemsize=2))
    values = {
        f"is_deepseek_{name}": lambda *_: True,
        "NSATokenToKVPool": pool,
        "DSATokenToKVPool": pool,
        "_is_hip": False,
        "_is_npu": False,
        "is_hip": lambda: False,
        "torch": probe.Stub(float8_e4m3fn="fp8"),
        "get_exec": lambda: probe.Stub(kernel=args),
        "get_disagg": lambda: probe.Stub(disaggregation_mode="null"),
    }
    function = module.real("calculate_mla_kv_cache_dim", probe.namespace(values, {}))
    node = module.function("calculate_mla_kv_cache_dim")
    if node.args.args:
        return function(probe.Stub(model_config=config, kv_cache_dtype="fp8", server_args=args))
    given = {"model_config": config, "kv_cache_dtype": "fp8", "server_args": args}
    return function(**{a.arg: given[a.arg] for a in node.args.kwonlyargs})


def _quantizes_pool(tree: Tree) -> dict[str, Any] | None:
    """flashmla_kv on a BF16 cache quantizes the whole pool in every layer: the same fault reversed."""
    module = file_of(tree, "dsa")
    function = module.function("_forward_flashmla_kv") if module else None
    for call in probe.calls(function, "quantize_k_cache") if function else []:
        return module.quote(call)
    return None


def _backend_class(module: Module) -> ast.ClassDef:
    return next(c for n in ("DeepseekSparseAttnBackend", "NativeSparseAttnBackend") if (c := module.cls(n)))


def _serves(tree: Tree, phase: str) -> dict[str, Any]:
    """Sub-backends that `forward_<phase>` has a branch for; the others reach its final refusal."""
    module = file_of(tree, "dsa")
    function = next(n for n in _backend_class(module).body if getattr(n, "name", "") == f"forward_{phase}")
    compared = (ast.unparse(n) for n in ast.walk(function) if isinstance(n, ast.Compare))
    found = {
        name
        for test in compared
        if re.match(r"(self\.)?\w+_impl\b", test)
        for name in re.findall(r"'(\w+)'", test)
    }
    return {"value": sorted(found), **module.quote(function), "quote": f"def forward_{phase}"}


def _wants_dsa(tree: Tree) -> dict[str, Any] | None:
    """The backend's own assertion that the model has an indexer."""
    module = file_of(tree, "dsa")
    for node in ast.walk(_backend_class(module)):
        if isinstance(node, ast.Assert) and re.fullmatch(r"self\.use_(nsa|dsa)", ast.unparse(node.test)):
            return {"says": probe.message(node.msg) if node.msg else "", **module.quote(node)}
    return None


def _trtllm_gen(tree: Tree) -> dict[str, Any] | None:
    """Sub-backend trtllm asks flashinfer for its trtllm-gen kernel by name."""
    module = file_of(tree, "dsa")
    for node in ast.walk(module.ast):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "backend"
            and "trtllm-gen" in ast.unparse(node.value)
        ):
            return module.quote(node)
    return None


def _flashinfer_sparse(tree: Tree) -> dict[str, Any] | None:
    module = file_of(tree, "dsa")
    node = module.function("_forward_flashinfer_sparse_mla") if module else None
    return {**module.quote(node), "quote": "def _forward_flashinfer_sparse_mla"} if node else None
