"""What a flashinfer release checks before MLA decode: shapes, devices, dtypes, from its source."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

from kvlab.backends import probe
from kvlab.backends.sources import Module, Tree

# SGLang's entry point calls the first of these that a release has; from 0.7.4 the other is one adapter's own.
CHECKS = ("_check_mla_functional_shape", "_check_trtllm_gen_mla_shape")
# The entry point of MLA decode, where its body is in a function of its own before it.
DECODE = (
    "_mla_with_kv_cache_impl",
    "_trtllm_batch_decode_with_kv_cache_mla_impl",
    "trtllm_batch_decode_with_kv_cache_mla",
)
NOPE = (64, 128, 192, 256)
HEAD_DIMS = ((192, 128), (256, 256), (128, 128))  # (QK, V): DeepSeek, GLM-5, the smaller MLA models
LATENT = ((512, 64), (512, 0), (256, 64))


def extract(tree: Tree) -> dict[str, Any]:
    """Facts of one release, each with the file, line and quote that it was read from. Needs torch."""
    return {
        "package": "flashinfer-python",
        "release": tree.release,
        "mla_shape": _mla_shape(tree),
        "block_num": _block_num(tree),
        "block_sizes": _block_sizes(tree),
        "xqa": _xqa(tree),
        "cute_dsl": _cute_dsl(tree),
        "native_fp8": _native_fp8(tree),
        "ragged_prefill": _ragged_prefill(tree),
    }


def find(tree: Tree, name: str, cls: str | None = None) -> tuple[Module, ast.FunctionDef] | None:
    """The file of `flashinfer/mla…` that defines a function; the one with SGLang's entry point first."""
    for module in _modules(tree):
        if f"def {name}" in module.text and (node := module.function(name, cls)):
            return module, node
    return None


def _modules(tree: Tree) -> list[Module]:
    first = [m for p in ("flashinfer/mla.py", "flashinfer/mla/_core.py") if (m := tree.module(p))]
    return first + [m for m in tree.modules("flashinfer/mla/**/*.py") if m not in first]


def check_parts(tree: Tree) -> list[tuple[Module, ast.FunctionDef]]:
    """The shape check, and behind it the functions of flashinfer that it calls; empty where there is none."""
    found = next((f for name in CHECKS if (f := find(tree, name))), None)
    parts = [found] if found else []
    utils = tree.module("flashinfer/utils.py")
    for _, node in parts:
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
            name = ast.unparse(call.func)
            if not name.startswith("_") or any(n.name == name for _, n in parts):
                continue
            if part := find(tree, name):
                parts.append(part)
            elif utils and (helper := utils.function(name)):
                parts.append((utils, helper))
    return parts


def shape_check(tree: Tree) -> Any:
    """The release's own shape check as a function of keyword arguments, or None where it has none.

    Keywords: query, kv_cache, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, page_table, page_size;
    those that the release's check does not take are dropped.
    """
    import torch

    parts = check_parts(tree)
    if not parts:
        return None
    scope: dict[str, Any] = {"torch": torch, "__name__": __name__}
    # The check compares with dimension tables that stand beside it.
    for module in dict.fromkeys(m for m, _ in parts):
        for node in module.ast.body:
            name = getattr(node, "name", None) or (
                ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
            )
            if (
                name == "MLAHeadDimensions"
                or name.lower().endswith("mla_dimensions")
                or name == "supported_mla_head_dimensions"
            ):
                body = ast.Module([ast.parse("from dataclasses import dataclass").body[0], node], [])
                exec(compile(ast.fix_missing_locations(body), module.rel, "exec"), scope)
    scope = probe.namespace({k: v for k, v in scope.items() if k != "__builtins__"}, {})
    # Those that are called before those that call them.
    for module, node in reversed(parts):
        scope[node.name] = module.real(node.name, scope)
    function = scope[parts[0][1].name]
    takes = inspect.signature(function).parameters
    defaults = {
        "sparse_mla_top_k": 0,
        "uses_shared_paged_kv_idx": True,
        "batch_size": None,
        "max_q_len": None,
    }

    def check(**given: Any) -> Any:
        if "batch_size" in takes:
            given = {**given, "batch_size": given["query"].shape[0], "max_q_len": 1}
        return function(**{k: v for k, v in {**defaults, **given}.items() if k in takes})

    return check


def call_shape_check(
    check: Any, *, nope: int, latent: tuple[int, int] = (512, 64), page: int = 64, blocks: int = 2
) -> Any:
    """Run a shape check on one request with 8 heads, BF16, on the meta device: `{raises, says}` or None."""
    import torch

    dim = sum(latent)
    given = {
        "query": torch.empty(1, 1, 8, dim, dtype=torch.bfloat16, device="meta"),
        "kv_cache": torch.empty(4, 1, page, dim, dtype=torch.bfloat16, device="meta"),
        "qk_nope_head_dim": nope,
        "kv_lora_rank": latent[0],
        "qk_rope_head_dim": latent[1],
        "page_table": torch.empty(1, blocks, dtype=torch.int32, device="meta"),
        "page_size": page,
    }
    said = probe.outcome(lambda: check(**given))
    return said if isinstance(said, dict) else None


def _mla_shape(tree: Tree) -> dict[str, Any] | None:
    """Which head dimensions the check admits, found by running it; and the line that refuses."""
    check = shape_check(tree)
    if check is None:
        return None
    refused = {nope: call_shape_check(check, nope=nope) for nope in NOPE}
    latent = [
        list(pair)
        for pair in LATENT
        if not call_shape_check(check, nope=64 if pair[0] == 256 else 128, latent=pair)
    ]
    branches = [(m, b) for m, node in check_parts(tree) for b in probe.ifs(node)]
    named = [(m, b) for m, b in branches if "qk_nope_head_dim" in ast.unparse(b.test)]
    module, branch = next(
        iter(named)
        if named
        else (
            (m, b)
            for m, b in branches
            if "dimensions" in ast.unparse(b.test).lower() and probe.raises(b.body)
        )
    )
    return {
        "qk_nope_head_dim": [n for n in NOPE if refused[n] is None],
        "latent": latent,
        "says": {str(n): r["says"] for n, r in refused.items() if r},
        **module.quote(branch),
    }


def _block_num(tree: Tree) -> dict[str, Any] | None:
    """The check that page-table width times page size is a multiple of 128 tokens."""
    for module, node in check_parts(tree):
        for branch in probe.ifs(node):
            test = ast.unparse(branch.test)
            if "block_num % (128 / block_size)" in test:
                return {
                    "optional": test.startswith("require_aligned"),
                    "says": probe.message(probe.raises(branch.body)),
                    **module.quote(branch),
                }
    return None


def _block_sizes(tree: Tree) -> dict[str, Any] | None:
    for module in _modules(tree):
        for branch in probe.ifs(module.ast):
            raised = probe.raises(branch.body)
            if raised and probe.message(raised).startswith("Supported block_size are"):
                sizes = sorted({int(n) for n in re.findall(r"\d+", ast.unparse(branch.test))})
                return {"value": sizes, "says": probe.message(raised), **module.quote(branch)}
    return None


def _xqa(tree: Tree) -> dict[str, Any] | None:
    """The kernel that `auto` takes outside SM100: its device, dtypes and head count."""
    found = find(tree, "trtllm_batch_decode_with_kv_cache_mla")
    module = found[0] if found else None
    auto = None
    for name in DECODE:
        where = find(tree, name)
        for branch in probe.ifs(where[1]) if where else []:
            test = ast.unparse(branch.test)
            for node in ast.walk(branch) if test.removeprefix("resolved_") == "backend == 'auto'" else ():
                if isinstance(node, ast.Assign) and "'xqa'" in ast.unparse(node.value):
                    auto = auto or where[0].quote(node)
    facts: dict[str, Any] = {"auto": auto, "device": None, "dtypes": None, "heads": None}
    for name in ("xqa_batch_decode_with_kv_cache_mla", *DECODE):
        where = find(tree, name)
        for branch in probe.ifs(where[1]) if where else []:
            raised = probe.raises(branch.body)
            said = probe.message(raised) if raised else ""
            if said.startswith("XQA MLA") and "fp8" in said and facts["dtypes"] is None:
                pairs = [["fp8", "fp8"], ["bf16", "bf16"]] if "bfloat16" in said else [["fp8", "fp8"]]
                facts["dtypes"] = {"value": pairs, "says": said, **where[0].quote(branch)}
            if said.startswith("XQA MLA") and "SM120" in said and facts["device"] is None:
                facts["device"] = {"majors": [12], "says": said, **where[0].quote(branch)}
    xqa = tree.module("flashinfer/xqa.py")
    node = xqa.function("xqa_mla") if xqa else None
    for child in ast.walk(node) if node else []:
        if (
            isinstance(child, ast.If)
            and "head_group_ratio" in ast.unparse(child.test)
            and probe.raises(child.body)
        ):
            facts["heads"] = {"value": 128, "checked": True, "says": probe.message(child), **xqa.quote(child)}
        elif (
            isinstance(child, ast.Assign)
            and ast.unparse(child) == "head_group_ratio = 128"
            and facts["heads"] is None
        ):
            # Before 0.6.12 the kernel is built for 128 query heads whatever the call has.
            facts["heads"] = {"value": 128, "checked": False, "says": "", **xqa.quote(child)}
    return facts if module else None


def _cute_dsl(tree: Tree) -> dict[str, Any] | None:
    """Where `backend="cute-dsl"` is offered for MLA decode and what it needs."""
    for name in DECODE:
        where = find(tree, name)
        for branch in probe.ifs(where[1]) if where else []:
            if "'cute-dsl'" in ast.unparse(branch.test):
                return where[0].quote(branch)
    return None


def _native_fp8(tree: Tree) -> dict[str, Any] | None:
    """Where BatchMLAPagedAttentionWrapper reads FP8 rows itself: by kernel, and what it refuses."""
    for module in _modules(tree):
        for branch in probe.ifs(module.ast):
            raised = probe.raises(branch.body)
            said = probe.message(raised) if raised else ""
            if re.match(r"FP8 kv_data_type for MLA (is only supported with|requires an SM90)", said):
                # From 0.7 the file serves fa2 and fa3 alike and refuses by device alone.
                kernels = [k for k in ("fa2", "fa3") if k in said.split("backend")[0]] or ["fa2", "fa3"]
                return {"kernels": kernels, "majors": [9], "says": said, **module.quote(branch)}
    return None


def _ragged_prefill(tree: Tree) -> dict[str, Any] | None:
    """Head dimensions (QK, V) that the prefill of trtllm_mla asserts, found by evaluating the assertion."""
    module = tree.module("flashinfer/prefill.py")
    node = module.function("trtllm_ragged_attention_deepseek") if module else None
    if node is None:
        return None
    checked = next(
        s
        for s in node.body
        if isinstance(s, ast.Assert) and ("shape[2]" in ast.unparse(s) or "is_" in ast.unparse(s))
    )
    before = [s for s in node.body if isinstance(s, ast.Assign) and s.lineno < checked.lineno]
    admitted = []
    for qk, v in HEAD_DIMS:
        shapes = {
            name: probe.Stub(shape=(1, 8, dim)) for name, dim in (("query", qk), ("key", qk), ("value", v))
        }
        exec(compile(ast.Module(before, []), module.rel, "exec"), shapes)
        if eval(compile(ast.Expression(checked.test), module.rel, "eval"), shapes):
            admitted.append([qk, v])
    return {
        "value": admitted,
        "says": probe.message(checked.msg) if checked.msg else "",
        **module.quote(checked),
    }
