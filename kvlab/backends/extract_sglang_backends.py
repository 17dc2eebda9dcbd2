"""What does an SGLang release let each MLA backend do? What it takes, refuses, casts and rounds."""

from __future__ import annotations

import ast
import re
from typing import Any

from kvlab.backends import probe
from kvlab.backends.extract_sglang_files import ATTENTION, SRT, file_of, registered
from kvlab.backends.sources import Module, Tree

_QUANTIZES = ("mla_quantize_and_rope_for_fp8", "quantize_and_rope_for_fp8")


def constraints(tree: Tree) -> dict[str, Any]:
    """By backend: the page sizes it takes, the one it is moved to, its KV dtypes and what it refuses."""
    functions = [
        (f"{SRT}/server_args.py", "_handle_attention_backend_compatibility"),
        (f"{SRT}/arg_groups/overrides.py", "_mla_backend_page_constraints"),
        (f"{SRT}/arg_groups/overrides.py", "_mla_kv_cache_dtype_checks"),
        (f"{SRT}/arg_groups/overrides.py", "_cutedsl_prefill_backend_fill"),
    ]
    found: dict[str, Any] = {}
    for path, name in functions:
        module = tree.module(path)
        function = module.function(name) if module else None
        for index, node in enumerate(function.body if function else []):
            if not isinstance(node, ast.If):
                continue
            backends = set(re.findall(r"attention_backend == '(\w+)'", ast.unparse(node.test)))
            backends &= {"flashmla", "cutlass_mla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"}
            # `if not (backend == X or …): return {}`: what follows is about X.
            negative = isinstance(node.test, ast.UnaryOp) and any(
                isinstance(s, ast.Return) for s in node.body
            )
            body = function.body[index + 1 :] if negative else node.body
            for backend in backends:
                _constraint(module, body, found.setdefault(backend, {"refuses": []}))
    return found


def _constraint(module: Module, body: list[ast.stmt], into: dict[str, Any]) -> None:
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("page_size"):
            into.setdefault(
                "page",
                {"sizes": probe.constants(node.value), "becomes": node.value.value, **module.quote(node)},
            )
        if not isinstance(node, ast.If):
            continue
        test = ast.unparse(node.test)
        if m := re.fullmatch(r"(?:self\.)?page_size not in (\[.*\])", test):
            becomes = next(s.value.value for s in node.body if isinstance(s, ast.Assign))
            into.setdefault(
                "page", {"sizes": ast.literal_eval(m[1]), "becomes": becomes, **module.quote(node)}
            )
        raised = probe.raises(node.body)
        if raised is None:
            continue
        if m := re.fullmatch(r"\w+\.kv_cache_dtype not in (\[.*\])", test):
            into["kv_dtypes"] = {
                "value": ast.literal_eval(m[1]),
                "says": probe.message(raised),
                **module.quote(node),
            }
        elif m := re.fullmatch(r"not (?:get_platform\(\)\.)?(is_\w+?)(?:_supported)?(?:\(\))?", test):
            into["refuses"].append({"platform": m[1], "says": probe.message(raised), **module.quote(node)})


def fa3_capability(tree: Tree) -> dict[str, Any] | None:
    """The assertion that keeps fa3 to Hopper for MLA."""
    module = tree.module(f"{ATTENTION}/attention_registry.py")
    function = module.function("create_flashattention_v3_backend") if module else None
    for node in ast.walk(function) if function else []:
        if isinstance(node, ast.Assert) and "use_mla_backend" in ast.unparse(node.test):
            majors = sorted(
                {int(n) for n in re.findall(r"== (\d+)", ast.unparse(node.test).split(" or ")[-1])}
            )
            return {"majors": majors, "says": probe.message(node.msg), **module.quote(node)}
    return None


def fa3_fp8(tree: Tree) -> dict[str, Any] | None:
    """With an e5m2 cache SGLang puts triton in fa3's place."""
    for path in (f"{SRT}/arg_groups/overrides.py", f"{SRT}/server_args.py"):
        module = tree.module(path)
        for node in ast.walk(module.ast) if module else []:
            if isinstance(node, ast.Call) and probe.message(node).startswith(
                "FlashAttention3 only supports fp8_e4m3"
            ):
                return {"says": probe.message(node), **module.quote(node)}
    return None


def tokenspeed(tree: Tree) -> dict[str, Any] | None:
    """What the release says of tokenspeed_mla's kernels; its argument check is wider."""
    module = tree.module(f"{SRT}/utils/common.py")
    node = module.function("is_tokenspeed_mla_available") if module else None
    said = ast.get_docstring(node) if node else None
    if node is None or said is None:
        return None
    return {**module.quote(node), "quote": " ".join(said.split()[-9:])}


def fa4(tree: Tree) -> dict[str, Any] | None:
    """Which FlashAttention versions the absorbed MLA path admits."""
    module = tree.module(f"{ATTENTION}/flashattention_backend.py")
    for node in ast.walk(module.ast) if module else []:
        if (
            isinstance(node, ast.Assert)
            and "fa_impl_ver" in ast.unparse(node.test)
            and "support here" in probe.message(node)
        ):
            return {
                "versions": sorted({int(n) for n in re.findall(r"\b(\d)\b", ast.unparse(node.test))}),
                **module.quote(node),
                "decode": _views_absorbed(module),
            }
    return None


def _views_absorbed(module: Module) -> dict[str, Any] | None:
    """Where decode takes the rows for absorbed ones: with fa4, MLA layers come unabsorbed in decode too."""
    function = module.function("forward_decode")
    for node in ast.walk(function) if function else []:
        if isinstance(node, ast.Assign) and ast.unparse(node).startswith("k_rope_cache = k_rope.view("):
            # The line that a traceback shows.
            return {**module.quote(node), "quote": "k_rope_cache = k_rope.view("}
    return None


def casts(tree: Tree, backend: str) -> dict[str, Any]:
    """`get_key_buffer(…).to(dtype)` on the pool, by phase."""
    module = file_of(tree, backend)
    found: dict[str, Any] = {}
    for phase in ("extend", "decode"):
        function = module.function(f"forward_{phase}") if module else None
        for call in probe.calls(function, "to") if function else []:
            if isinstance(call.func.value, ast.Call) and any(probe.calls(call.func.value, "get_key_buffer")):
                found[phase] = module.quote(call)
                break
    return found


def inherits(tree: Tree, backend: str) -> str | None:
    """The first base of the backend's class: what it does not override is the base's."""
    module = file_of(tree, backend)
    for node in module.ast.body if module else []:
        if isinstance(node, ast.ClassDef) and re.search(r"(Backend|AttnBackend)$", node.name) and node.bases:
            return ast.unparse(node.bases[0])
    return None


def rounds_q(tree: Tree) -> dict[str, Any]:
    """Where a backend rounds the query to FP8 when the cache is FP8."""
    found: dict[str, Any] = {}
    for backend in ("flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"):
        module = file_of(tree, backend)
        if module is None or backend not in registered(tree):
            continue
        # tokenspeed_mla and, before it had a file, cutedsl_mla quantize in the class that they inherit from.
        for where in (module, file_of(tree, "trtllm_mla")):
            names = ("scaled_fp8_quant",) if backend == "flashmla" else _QUANTIZES
            call = next((c for n in names for c in probe.calls(where.ast, n)), None)
            if call:
                found[backend] = where.quote(call)
                break
    module = tree.module(
        f"{ATTENTION}/triton_ops/decode_attention.py", "sglang/kernels/ops/attention/decode_attention.py"
    )
    # The grouped kernel is MLA's. `k.to(q.dtype)` widens the cache; `q.to(<cache's type>)` rounds the query.
    function = module.function("_fwd_grouped_kernel_stage1") if module else None
    for node in ast.walk(function) if function else []:
        if isinstance(node, ast.Call) and ast.unparse(node) in (
            "q.to(K_Buffer.dtype.element_ty)",
            "q.to(k.dtype)",
        ):
            found["triton"] = module.quote(node)
        elif isinstance(node, ast.Call) and ast.unparse(node) == "k.to(q.dtype)":
            found.setdefault("triton_widens", module.quote(node))
    if "triton" in found:
        found.pop("triton_widens", None)
    for node in ast.walk(function) if function else []:
        # The probabilities meet FP8 values in the value product: they are rounded in every release so far.
        if isinstance(node, ast.Call) and ast.unparse(node) == "p.to(v.dtype)":
            found["triton_p"] = module.quote(node)
    return found
