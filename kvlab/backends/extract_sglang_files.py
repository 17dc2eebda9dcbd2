"""Where in SGLang's source, which moves with every release, do its backends and its choices stand?"""

from __future__ import annotations

import ast
from typing import Any

from kvlab.backends import probe
from kvlab.backends.sources import Module, Tree

SRT = "sglang/srt"
ATTENTION = f"{SRT}/layers/attention"

# MLA backends that SGLang has had, with the file of the class that serves MLA. `dsa` is `nsa` before 0.5.13.
BACKENDS = {
    "flashinfer": ["flashinfer_mla_backend.py"],
    "fa3": ["flashattention_backend.py"],
    "fa4": ["flashattention_backend.py"],
    "flashmla": ["flashmla_backend.py"],
    "cutlass_mla": ["cutlass_mla_backend.py"],
    "trtllm_mla": ["trtllm_mla_backend.py"],
    "cutedsl_mla": ["cutedsl_mla_backend.py", "trtllm_mla_backend.py"],
    "tokenspeed_mla": ["tokenspeed_mla_backend.py"],
    "triton": ["triton_backend.py"],
    "torch_native": ["torch_native_backend.py"],
    "flex_attention": ["torch_flex_backend.py"],
    "dsa": ["dsa_backend.py", "nsa_backend.py"],
    "aiter": ["aiter_backend.py"],
    "wave": ["wave_backend.py"],
    "ascend": [],
    "intel_amx": ["intel_amx_backend.py"],
    "intel_xpu": ["xpu_backend.py"],
}


def file_of(tree: Tree, backend: str) -> Module | None:
    """The file of the class that serves MLA for one of BACKENDS; None where the release has none."""
    return tree.module(*(f"{ATTENTION}/{name}" for name in BACKENDS[backend]))


def override_files(tree: Tree) -> list[Module | None]:
    """Where arguments are changed for a model: server_args.py alone at first."""
    names = ("model_overrides/deepseek_v2", "model_override_base", "overrides")
    return [*(tree.module(f"{SRT}/arg_groups/{n}.py") for n in names), tree.module(f"{SRT}/server_args.py")]


def choices(tree: Tree, *names: str) -> dict[str, Any] | None:
    """The list of that name (the first that there is), as an argument's choices, and where it stands."""
    for module in (tree.module(f"{SRT}/server_args.py"), tree.module(f"{SRT}/arg_groups/choices.py")):
        for name in names:
            node = probe.assigned(module, name) if module else None
            if module and node and isinstance(node.value, ast.List):
                return {
                    "value": probe.constants(node.value),
                    "file": module.rel,
                    "line": node.lineno,
                    "quote": name,
                }
    return None


def registered(tree: Tree) -> dict[str, Any]:
    """Names that the attention registry knows, with their factory's line."""
    module = tree.module(f"{ATTENTION}/attention_registry.py")
    found: dict[str, Any] = {}
    for node in module.ast.body if module else []:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if (
                isinstance(decorator, ast.Call)
                and ast.unparse(decorator.func) == "register_attention_backend"
            ):
                name = decorator.args[0].value
                found[name] = module.quote(decorator)
    return found
