"""What does an SGLang release pick where nothing is asked for, on which card? Its own functions are run."""

from __future__ import annotations

import ast
from typing import Any

from kvlab.backends import probe
from kvlab.backends.extract_sglang_files import SRT, override_files
from kvlab.backends.sources import Module, Tree

MAJORS = (8, 9, 10, 12)
DTYPES = ("fp8_e4m3", "bfloat16")


def default_mla(tree: Tree) -> dict[str, Any]:
    """The backend that SGLang picks for a dense MLA model, by card: its own function, run."""
    found: dict[str, Any] = {}
    for path, name in (
        (f"{SRT}/arg_groups/model_override_base.py", "get_default_attn_backend"),
        (f"{SRT}/server_args.py", "_get_default_attn_backend"),
        (f"{SRT}/server_args.py", "_handle_attention_backend_compatibility"),
    ):
        module = tree.module(path)
        node = module.function(name) if module else None
        if node is None:
            continue
        for major in MAJORS:
            found[str(major)] = _run_default(module, name, major)
        found.update(module.quote(node))
        found["quote"] = f"def {name}"
        break
    # DeepSeek-family overrides come first: on SM100 they name trtllm_mla for models without an indexer.
    if override := _sm100_override(tree):
        found["10"] = override["backend"]
        found["override"] = override
    return found


def _run_default(module: Module, name: str, major: int) -> str:
    config = probe.Stub(hf_config=probe.Stub(architectures=["DeepseekV3ForCausalLM"]), context_len=4096)
    args = probe.Stub(
        get_model_config=lambda: config,
        use_mla_backend=lambda: True,
        device="cuda",
        kv_cache_dtype="fp8_e4m3",
        page_size=1,
    )
    values = {**platform(major), "resolving_view": lambda a: a, "resolved_view": lambda a: a}
    sglang = probe.Stub(current_platform=values["current_platform"])
    function = module.real(name, probe.namespace(values, {"sglang": sglang, "torch": torch_on(major)}))
    if name == "_handle_attention_backend_compatibility":
        function(args)
        return args.attention_backend
    return function(args, True, config)


def _sm100_override(tree: Tree) -> dict[str, Any] | None:
    for module in override_files(tree):
        for node in ast.walk(module.ast) if module else []:
            if isinstance(
                node, ast.Call
            ) and "trtllm_mla as attention backend on sm100 for Deepseek" in probe.message(node):
                return {"backend": "trtllm_mla", **module.quote(node)}
    return None


def sub_defaults(tree: Tree, name: str, architecture: str) -> dict[str, Any]:
    """`{dtype: {major: [prefill, decode]}}`: the sub-backends that the release picks, from running it."""
    return {
        dtype: {str(major): _run_sub_default(tree, name, architecture, dtype, major) for major in MAJORS}
        for dtype in DTYPES
    }


def _run_sub_default(tree: Tree, name: str, architecture: str, dtype: str, major: int) -> list[str]:
    fields = (f"{name}_prefill_backend", f"{name}_decode_backend")
    hf = probe.Stub(architectures=[architecture], learnable_sink=False)
    config = probe.Stub(hf_config=hf)
    view = probe.Stub(
        kv_cache_dtype=dtype, enable_hisparse=False, get_model_config=lambda: config, **dict.fromkeys(fields)
    )
    sglang = probe.Stub(
        is_deepseek_dsa=lambda *_: True,
        is_deepseek_nsa=lambda *_: True,
        apply_hisparse_dsa_backend_defaults=lambda *_: False,
        apply_hisparse_nsa_backend_defaults=lambda *_: False,
        is_hip=lambda: False,
    )
    values = {
        **platform(major),
        "model_config_of": lambda *_: config,
        "_DEEPSEEK_FAMILY_ARCHS": {architecture},
        "_check_dsa_backend_constraints": lambda *_, **__: None,
        "_check_tilelang_dsa_fp8_kv": lambda *_, **__: None,
    }
    scope = probe.namespace(values, {"sglang": sglang, "torch": torch_on(major)})
    overrides = tree.module(f"{SRT}/arg_groups/overrides.py")
    if overrides and overrides.function("_dsa_split_backend_resolution"):
        declared = overrides.real("_dsa_split_backend_resolution", scope)(view)
        return [declared[f] for f in fields]
    args = tree.module(f"{SRT}/server_args.py")
    method = f"_set_default_{name}_backends"
    if args.function(method):
        args.real(method, scope)(view, dtype, major)
        return [getattr(view, f) for f in fields]
    return _run_inline_default(args, fields, dtype, major)


def _run_inline_default(args: Module, fields: tuple[str, str], dtype: str, major: int) -> list[str]:
    """0.5.8 decides inside a long handler: the one `if` that assigns the sub-backends, run by itself."""
    declared = {
        ast.unparse(n.target): n.value.value
        for n in ast.walk(args.cls("ServerArgs"))
        if isinstance(n, ast.AnnAssign)
        and ast.unparse(n.target) in fields
        and isinstance(n.value, ast.Constant)
    }
    view = probe.Stub(kv_cache_dtype=dtype, **declared)
    branch = next(
        b
        for b in probe.ifs(args.ast)
        if "kv_cache_dtype ==" in ast.unparse(b.test) and fields[1] in ast.unparse(b)
    )
    exec(
        compile(ast.Module([branch], []), args.rel, "exec"),
        probe.namespace({"self": view, "major": major}, {}),
    )
    return [getattr(view, f) for f in fields]


def default_kv_dtype(tree: Tree, name: str) -> dict[str, Any]:
    """What `--kv-cache-dtype auto` becomes for a DSA model, by card: the release's own function, run."""
    overrides = tree.module(f"{SRT}/arg_groups/overrides.py")
    args = tree.module(f"{SRT}/server_args.py")
    method = f"_set_default_{name}_kv_cache_dtype"
    if overrides and (node := overrides.function("_dsa_kv_cache_dtype_default")):
        module = overrides
    elif node := args.function(method):
        module = args
    else:
        # 0.5.8 decides inside a long handler.
        node = next(
            n
            for n in ast.walk(args.ast)
            if isinstance(n, ast.IfExp) and "'fp8_e4m3' if major" in ast.unparse(n)
        )
        code = compile(ast.Expression(node), args.rel, "eval")
        return {"value": {str(m): eval(code, {"major": m}) for m in MAJORS}, **args.quote(node)}
    values = {}
    for major in MAJORS:
        config = probe.Stub(
            hf_config=probe.Stub(architectures=["DeepseekV32ForCausalLM"], learnable_sink=False)
        )
        view = probe.Stub(kv_cache_dtype="auto", get_model_config=lambda config=config: config)
        known = {
            **platform(major),
            "model_config_of": lambda *_, config=config: config,
            "_DEEPSEEK_FAMILY_ARCHS": {"DeepseekV32ForCausalLM"},
        }
        modules = {"sglang": probe.Stub(is_deepseek_dsa=lambda *_: True), "torch": torch_on(major)}
        function = module.real(node.name, probe.namespace(known, modules))
        # 0.5.10 to 0.5.12 also pass the quantization.
        more = {"quantization": None} if any(a.arg == "quantization" for a in node.args.args) else {}
        declared = function(view) if module is overrides else function(view, major, **more)
        values[str(major)] = declared["kv_cache_dtype"] if module is overrides else view.kv_cache_dtype
    return {"value": values, **module.quote(node), "quote": f"def {node.name}"}


def platform(major: int) -> dict[str, Any]:
    """Stand-ins for the platform predicates of every release, for a CUDA card of that major."""
    yes = {
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm90_supported": major == 9,
        "is_sm100_supported": major == 10,
        "is_sm120_supported": major == 12,
        "is_blackwell_supported": major in (10, 11, 12),
        "is_flashinfer_available": True,
    }
    no = ("is_hip", "is_npu", "is_xpu", "is_mps", "is_musa", "is_cpu", "is_host_cpu_arm64")
    view = probe.Stub(
        is_hopper_with_cuda_12_3=major == 9,
        is_sm90=major == 9,
        is_sm100=major == 10,
        is_sm100_or_sm110=major == 10,
        is_sm120=major == 12,
        is_blackwell=major in (10, 11, 12),
        is_hip=False,
        is_npu=False,
        is_xpu=False,
        has_flashinfer=True,
    )
    return {
        **{name: (lambda value=value: value) for name, value in yes.items()},
        **{name: (lambda: False) for name in no},
        "get_platform": lambda: view,
        "current_platform": probe.Stub(is_out_of_tree=lambda: False),
    }


def torch_on(major: int) -> probe.Stub:
    """`torch` as far as the argument handlers use it."""
    return probe.Stub(
        cuda=probe.Stub(get_device_capability=lambda *_: (major, 0)),
        float8_e4m3fn="fp8_e4m3",
        bfloat16="bfloat16",
    )
