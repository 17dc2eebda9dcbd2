"""What sgl-kernel and sgl-flash-mla check: cutlass_mla_decode's assertions, FlashMLA's devices."""

from __future__ import annotations

import ast
from typing import Any

from kvlab.backends import probe
from kvlab.backends.sources import Tree


def extract(tree: Tree) -> dict[str, Any]:
    """Facts of one release, each with file, line and quote; a compiled extension's message has no line."""
    return {
        "package": tree.package,
        "release": tree.release,
        "cutlass_mla": _cutlass_mla(tree),
        "flashmla": _flashmla(tree),
    }


def _cutlass_mla(tree: Tree) -> dict[str, Any] | None:
    module = tree.module("sgl_kernel/attention.py")
    function = module.function("cutlass_mla_decode") if module else None
    if function is None:
        return None
    found: dict[str, Any] = {**module.quote(function), "quote": "def cutlass_mla_decode"}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assert):
            continue
        test = ast.unparse(node.test)
        if test.startswith("block_num % (128 / PAGE_SIZE)"):
            found["block_num"] = module.quote(node)
        elif test.startswith("q_nope.dtype in"):
            found["q_dtype"] = module.quote(node)
        elif test == "q_nope.dtype == q_pe.dtype == kv_c_and_k_pe_cache.dtype":
            found["same_dtype"] = module.quote(node)
        elif test.startswith("H <="):
            found["max_heads"] = {"value": 128, "says": probe.message(node), **module.quote(node)}
    said = [
        m
        for m in tree.messages("sgl_kernel/sm100/common_ops.abi3.so")
        if m.startswith("cutlass_mla_decode is only")
    ]
    if said:
        found["device"] = {
            "majors": [10],
            "file": "sgl_kernel/sm100/common_ops.abi3.so",
            "line": None,
            "quote": said[0].strip(),
        }
    return found


def _flashmla(tree: Tree) -> dict[str, Any]:
    extension = (
        "flash_mla/_C_legacy.abi3.so"
        if tree.package == "sgl-flash-mla"
        else "sgl_kernel/flashmla_ops.abi3.so"
    )
    messages = tree.messages(extension)

    def said(*starts: str) -> dict[str, Any] | None:
        found = next((m for s in starts for m in messages if m.startswith(s)), None)
        return {"file": extension, "line": None, "quote": found} if found else None

    return {
        "dense_fp8": said("Dense FP8 MLA is only supported on SM90"),
        "dense_bf16": said(
            "Dense decode MLA is only supported on SM90a", "BF16 Dence MLA is not supported on SM100"
        ),
        "sparse": said(
            "Sparse Attention Forward Kernel is only supported",
            "Sparse Attention Forward Kernel (sparse_prefill_fwd)",
        ),
        "page": said("Currently page_block_size must be 64"),
    }
