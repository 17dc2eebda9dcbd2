"""What an SGLang release says about its MLA backends: its source read, its decisions run."""

from __future__ import annotations

import ast
import re
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
_QUANTIZES = ("mla_quantize_and_rope_for_fp8", "quantize_and_rope_for_fp8")
MAJORS = (8, 9, 10, 12)
DTYPES = ("fp8_e4m3", "bfloat16")


def extract(tree: Tree) -> dict[str, Any]:
    """Facts of one release, each with the file, line and quote that it was read from."""
    args = tree.module(f"{SRT}/server_args.py")
    config = tree.module(f"{SRT}/configs/model_config.py")
    if args is None or config is None:
        raise LookupError(f"sglang {tree.release}: no server_args.py, this is no SGLang source")
    dsa = _dsa(tree, args, config)
    registered = _registered(tree)
    return {
        "package": "sglang",
        "release": tree.release,
        "pins": _pins(tree),
        "platforms": _platforms(tree),
        "mla_architectures": _mla_architectures(config),
        "models": _models(tree),
        "choices": _choices(tree, "ATTENTION_BACKEND_CHOICES"),
        "registered": registered,
        "constraints": _constraints(tree),
        "capability": _fa3_capability(tree),
        "fa3_fp8": _fa3_fp8(tree),
        "fa4": _fa4(tree),
        "tokenspeed": _tokenspeed(tree),
        "casts": {name: _casts(tree, name) for name in BACKENDS if name != "dsa"},
        "inherits": {name: _inherits(tree, name) for name in BACKENDS},
        "rounds_q": _rounds_q(tree),
        "default_mla": _default_mla(tree),
        "dsa": dsa,
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


def _choices(tree: Tree, *names: str) -> dict[str, Any] | None:
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


def _registered(tree: Tree) -> dict[str, Any]:
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


def _constraints(tree: Tree) -> dict[str, Any]:
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


def _fa3_capability(tree: Tree) -> dict[str, Any] | None:
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


def _fa3_fp8(tree: Tree) -> dict[str, Any] | None:
    """With an e5m2 cache SGLang puts triton in fa3's place."""
    for path in (f"{SRT}/arg_groups/overrides.py", f"{SRT}/server_args.py"):
        module = tree.module(path)
        for node in ast.walk(module.ast) if module else []:
            if isinstance(node, ast.Call) and probe.message(node).startswith(
                "FlashAttention3 only supports fp8_e4m3"
            ):
                return {"says": probe.message(node), **module.quote(node)}
    return None


def _tokenspeed(tree: Tree) -> dict[str, Any] | None:
    """What the release says of tokenspeed_mla's kernels; its argument check is wider."""
    module = tree.module(f"{SRT}/utils/common.py")
    node = module.function("is_tokenspeed_mla_available") if module else None
    said = ast.get_docstring(node) if node else None
    if node is None or said is None:
        return None
    return {**module.quote(node), "quote": " ".join(said.split()[-9:])}


def _fa4(tree: Tree) -> dict[str, Any] | None:
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


def _file(tree: Tree, backend: str) -> Module | None:
    return tree.module(*(f"{ATTENTION}/{name}" for name in BACKENDS[backend]))


def _casts(tree: Tree, backend: str) -> dict[str, Any]:
    """`get_key_buffer(…).to(dtype)` on the pool, by phase."""
    module = _file(tree, backend)
    found: dict[str, Any] = {}
    for phase in ("extend", "decode"):
        function = module.function(f"forward_{phase}") if module else None
        for call in probe.calls(function, "to") if function else []:
            if isinstance(call.func.value, ast.Call) and any(probe.calls(call.func.value, "get_key_buffer")):
                found[phase] = module.quote(call)
                break
    return found


def _inherits(tree: Tree, backend: str) -> str | None:
    """The first base of the backend's class: what it does not override is the base's."""
    module = _file(tree, backend)
    for node in module.ast.body if module else []:
        if isinstance(node, ast.ClassDef) and re.search(r"(Backend|AttnBackend)$", node.name) and node.bases:
            return ast.unparse(node.bases[0])
    return None


def _rounds_q(tree: Tree) -> dict[str, Any]:
    """Where a backend rounds the query to FP8 when the cache is FP8."""
    found: dict[str, Any] = {}
    for backend in ("flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"):
        module = _file(tree, backend)
        if module is None or backend not in _registered(tree):
            continue
        # tokenspeed_mla and, before it had a file, cutedsl_mla quantize in the class that they inherit from.
        for where in (module, _file(tree, "trtllm_mla")):
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


def _cuda(major: int) -> probe.Stub:
    """`torch` as far as the argument handlers use it."""
    return probe.Stub(
        cuda=probe.Stub(get_device_capability=lambda *_: (major, 0)),
        float8_e4m3fn="fp8_e4m3",
        bfloat16="bfloat16",
    )


def _default_mla(tree: Tree) -> dict[str, Any]:
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
    function = module.real(name, probe.namespace(values, {"sglang": sglang, "torch": _cuda(major)}))
    if name == "_handle_attention_backend_compatibility":
        function(args)
        return args.attention_backend
    return function(args, True, config)


def _sm100_override(tree: Tree) -> dict[str, Any] | None:
    for module in (
        tree.module(f"{SRT}/arg_groups/model_overrides/deepseek_v2.py"),
        tree.module(f"{SRT}/arg_groups/model_override_base.py"),
        tree.module(f"{SRT}/arg_groups/overrides.py"),
        tree.module(f"{SRT}/server_args.py"),
    ):
        for node in ast.walk(module.ast) if module else []:
            if isinstance(
                node, ast.Call
            ) and "trtllm_mla as attention backend on sm100 for Deepseek" in probe.message(node):
                return {"backend": "trtllm_mla", **module.quote(node)}
    return None


def _dsa(tree: Tree, args: Module, config: Module) -> dict[str, Any]:
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
        "GlmMoeDsaForCausalLM": _sub_defaults(tree, name, "GlmMoeDsaForCausalLM"),
        "*": _sub_defaults(tree, name, "DeepseekV32ForCausalLM"),
    }
    facts["default_kv_dtype"] = _default_kv_dtype(tree, name)
    facts["quantizes_pool"] = _quantizes_pool(tree)
    facts["serves"] = {phase: _serves(tree, phase) for phase in ("decode", "extend")}
    facts["wants_dsa"] = _wants_dsa(tree)
    facts["trtllm_gen"] = _trtllm_gen(tree)
    facts["sparse_sm120"] = _flashinfer_sparse(tree)
    return facts


def _dsa_choices(tree: Tree, name: str) -> dict[str, Any]:
    found = _choices(tree, "DSA_CHOICES", "NSA_CHOICES")
    if found is None:
        # From 0.5.19 the choices stand in the argument's own declaration.
        for module in (
            *tree.modules(f"{SRT}/arg_groups/fields/*.py"),
            *tree.modules(f"{SRT}/server_args.py"),
        ):
            for node in ast.walk(module.ast):
                if isinstance(node, ast.List) and {"flashmla_sparse", "trtllm"} <= set(probe.constants(node)):
                    return {
                        "value": probe.constants(node),
                        "file": module.rel,
                        "line": node.lineno,
                        "quote": "choices",
                    }
        for module in tree.modules(f"{SRT}/arg_groups/*.py"):
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
    for module in (
        tree.module(f"{SRT}/arg_groups/model_overrides/deepseek_v2.py"),
        tree.module(f"{SRT}/arg_groups/model_override_base.py"),
        tree.module(f"{SRT}/arg_groups/overrides.py"),
        tree.module(f"{SRT}/server_args.py"),
    ):
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
    for module in (
        tree.module(f"{SRT}/arg_groups/model_overrides/deepseek_v2.py"),
        tree.module(f"{SRT}/arg_groups/model_override_base.py"),
        tree.module(f"{SRT}/arg_groups/overrides.py"),
        tree.module(f"{SRT}/server_args.py"),
    ):
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


def _sub_defaults(tree: Tree, name: str, architecture: str) -> dict[str, Any]:
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
    scope = probe.namespace(values, {"sglang": sglang, "torch": _cuda(major)})
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


def _default_kv_dtype(tree: Tree, name: str) -> dict[str, Any]:
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
        modules = {"sglang": probe.Stub(is_deepseek_dsa=lambda *_: True), "torch": _cuda(major)}
        function = module.real(node.name, probe.namespace(known, modules))
        # 0.5.10 to 0.5.12 also pass the quantization.
        more = {"quantization": None} if any(a.arg == "quantization" for a in node.args.args) else {}
        declared = function(view) if module is overrides else function(view, major, **more)
        values[str(major)] = declared["kv_cache_dtype"] if module is overrides else view.kv_cache_dtype
    return {"value": values, **module.quote(node), "quote": f"def {node.name}"}


def _quantizes_pool(tree: Tree) -> dict[str, Any] | None:
    """flashmla_kv on a BF16 cache quantizes the whole pool in every layer: the same fault reversed."""
    module = tree.module(f"{ATTENTION}/dsa_backend.py", f"{ATTENTION}/nsa_backend.py")
    function = module.function("_forward_flashmla_kv") if module else None
    for call in probe.calls(function, "quantize_k_cache") if function else []:
        return module.quote(call)
    return None


def _backend_class(module: Module) -> ast.ClassDef:
    return next(c for n in ("DeepseekSparseAttnBackend", "NativeSparseAttnBackend") if (c := module.cls(n)))


def _serves(tree: Tree, phase: str) -> dict[str, Any]:
    """Sub-backends that `forward_<phase>` has a branch for; the others reach its final refusal."""
    module = tree.module(f"{ATTENTION}/dsa_backend.py", f"{ATTENTION}/nsa_backend.py")
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
    module = tree.module(f"{ATTENTION}/dsa_backend.py", f"{ATTENTION}/nsa_backend.py")
    for node in ast.walk(_backend_class(module)):
        if isinstance(node, ast.Assert) and re.fullmatch(r"self\.use_(nsa|dsa)", ast.unparse(node.test)):
            return {"says": probe.message(node.msg) if node.msg else "", **module.quote(node)}
    return None


def _trtllm_gen(tree: Tree) -> dict[str, Any] | None:
    """Sub-backend trtllm asks flashinfer for its trtllm-gen kernel by name."""
    module = tree.module(f"{ATTENTION}/dsa_backend.py", f"{ATTENTION}/nsa_backend.py")
    for node in ast.walk(module.ast):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "backend"
            and "trtllm-gen" in ast.unparse(node.value)
        ):
            return module.quote(node)
    return None


def _flashinfer_sparse(tree: Tree) -> dict[str, Any] | None:
    module = tree.module(f"{ATTENTION}/dsa_backend.py", f"{ATTENTION}/nsa_backend.py")
    node = module.function("_forward_flashinfer_sparse_mla") if module else None
    return {**module.quote(node), "quote": "def _forward_flashinfer_sparse_mla"} if node else None
