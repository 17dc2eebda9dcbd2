"""What an SGLang release says about its MLA backends: its source read, its decisions run."""

from __future__ import annotations

import ast
import re
from typing import Any

from kvlab.backends import extract_sglang_backends as backends
from kvlab.backends import probe
from kvlab.backends.extract_sglang_defaults import default_mla
from kvlab.backends.extract_sglang_dsa import sparse
from kvlab.backends.extract_sglang_files import BACKENDS, SRT, choices, registered
from kvlab.backends.sources import Module, Tree


def extract(tree: Tree) -> dict[str, Any]:
    """Facts of one release, each with the file, line and quote that it was read from."""
    args = tree.module(f"{SRT}/server_args.py")
    config = tree.module(f"{SRT}/configs/model_config.py")
    if args is None or config is None:
        raise LookupError(f"sglang {tree.release}: no server_args.py, this is no SGLang source")
    return {
        "package": "sglang",
        "release": tree.release,
        "pins": _pins(tree),
        "platforms": _platforms(tree),
        "mla_architectures": _mla_architectures(config),
        "models": _models(tree),
        "choices": choices(tree, "ATTENTION_BACKEND_CHOICES"),
        "registered": registered(tree),
        "constraints": backends.constraints(tree),
        "capability": backends.fa3_capability(tree),
        "fa3_fp8": backends.fa3_fp8(tree),
        "fa4": backends.fa4(tree),
        "tokenspeed": backends.tokenspeed(tree),
        "casts": {name: backends.casts(tree, name) for name in BACKENDS if name != "dsa"},
        "inherits": {name: backends.inherits(tree, name) for name in BACKENDS},
        "rounds_q": backends.rounds_q(tree),
        "default_mla": default_mla(tree),
        "dsa": sparse(tree, args, config),
    }


def _pins(tree: Tree) -> dict[str, str]:
    pins = tree.requires
    kernel = next((k for k in ("sglang-kernel", "sgl-kernel") if k in pins), None)
    found = {"flashinfer-python": pins.get("flashinfer-python"), "torch": pins.get("torch")}
    if kernel:
        found[kernel] = pins[kernel]
    for extra in ("sgl-flash-mla", "tokenspeed-mla"):
        if extra in pins:
            found[extra] = pins[extra]
    return {k: v for k, v in found.items() if v}


def _platforms(tree: Tree) -> dict[str, list[int]]:
    """Platform predicates and the compute-capability majors that they admit."""
    module = tree.module(f"{SRT}/utils/common.py")
    found: dict[str, list[int]] = {}
    for node in module.ast.body if module else []:
        if not isinstance(node, ast.Assign):
            continue
        for keyword in (k for c in ast.walk(node.value) if isinstance(c, ast.Call) for k in c.keywords):
            if keyword.arg == "device_capability_majors":
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found[target.id] = probe.constants(keyword.value)
    return found


def _mla_architectures(config: Module) -> dict[str, Any]:
    """Architectures that the release serves with MLA: the branches that set AttentionArch.MLA."""
    names: set[str] = set()
    first: ast.AST | None = None
    for branch in probe.ifs(config.ast):
        sets = [
            s
            for s in branch.body
            if isinstance(s, ast.Assign) and ast.unparse(s.value) == "AttentionArch.MLA"
        ]
        if sets:
            first = first or sets[0]
            names |= set(
                re.findall(
                    r"'([A-Z]\w+(?:ForCausalLM|ForConditionalGeneration)\w*)'", ast.unparse(branch.test)
                )
            )
    return {"value": sorted(names), **(config.quote(first) if first else {})}


def _models(tree: Tree) -> dict[str, Any]:
    """Model classes that the release has, by name: only those of MLA architectures."""
    found = {}
    for module in tree.modules(f"{SRT}/models/*.py"):
        if (
            "kv_lora_rank" not in module.text
            and "DeepseekV2" not in module.text
            and "DeepseekV3" not in module.text
        ):
            continue
        for node in module.ast.body:
            if isinstance(node, ast.ClassDef) and re.search(
                r"For(CausalLM|ConditionalGeneration)$", node.name
            ):
                found[node.name] = {"file": module.rel, "line": node.lineno, "quote": f"class {node.name}"}
    return found
