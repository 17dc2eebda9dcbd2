"""What Triton says about FP8 types: the sglang triton backend reads e4m3 rows as `fp8e4nv`."""

from __future__ import annotations

import ast
from typing import Any

from kvlab.backends import probe
from kvlab.backends.sources import Tree


def extract(tree: Tree) -> dict[str, Any]:
    """Facts of one release, each with the file, line and quote."""
    module = tree.module("triton/backends/nvidia/compiler.py")
    for branch in probe.ifs(module.ast) if module else []:
        if "capability" in ast.unparse(branch.test) and any("fp8e4nv" in ast.unparse(s) for s in branch.body):
            least = next(
                n.value
                for n in ast.walk(branch.test)
                if isinstance(n, ast.Constant) and isinstance(n.value, int)
            )
            return {
                "package": "triton",
                "release": tree.release,
                "e4m3": {
                    "capability": least,
                    **module.quote(branch),
                    "quote": f"if {ast.unparse(branch.test)}: {ast.unparse(branch.body[0])}",
                },
            }
    raise LookupError(f"triton {tree.release}: where it admits fp8e4nv is not where it was")
