"""What does SGLang say of this process's server, and of a backend in it?"""

import contextlib
import os
import sys
from typing import Any

from kvlab.patch.sites import FAMILIES


def arguments() -> Any:
    """The arguments of this process's server, as SGLang keeps them; None where it has none."""
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        get = getattr(sys.modules.get(module), name, None)
        with contextlib.suppress(Exception):
            if callable(get) and (found := get()) is not None:
                return found
    return None


def identity(model_runner: Any) -> dict[str, Any]:
    """Which server and rank this process serves."""
    args = getattr(model_runner, "server_args", None)
    found = {name: getattr(args, name, None) for name in ("port", "host", "tp_size", "dp_size", "pp_size")}
    for name in ("tp_rank", "pp_rank", "dp_rank", "gpu_id"):
        found[name] = getattr(model_runner, name, None)
    return {k: v for k, v in found.items() if isinstance(v, int | str)}


def heads(config: Any, server_args: Any) -> int | None:
    """Query heads of this rank, as attention will see them; a call says for certain."""
    every = getattr(config, "num_attention_heads", None)
    tp = getattr(server_args, "tp_size", None)
    if not isinstance(every, int) or not isinstance(tp, int):
        return None
    if getattr(server_args, "enable_dp_attention", False):
        tp //= getattr(server_args, "dp_size", 1) or 1
    return max(every // max(tp, 1), 1)


def kinds(backend: Any) -> list[str]:
    """The kinds of calls that come to a site: FlashMLA, TRTLLM-MLA and Cutlass decode with kernels of their
    own.
    """
    # A sibling's own sibling inherits it from there; other plugins may wrap either's.
    decodes = next((c for c in type(backend).__mro__ if "forward_decode" in vars(c)), None)
    is_site_s = decodes is None or decodes.__name__ in {family.cls for family in FAMILIES}
    return ["decode", "extend"] if is_site_s else ["extend"]


def outside(server_args: Any, has_graphs: bool) -> str | None:
    """What the whole server does that leaves every call to stock."""
    if (getattr(server_args, "dcp_size", 1) or 1) > 1:
        return "decode context parallelism"
    if not has_graphs and overlaps_plans():
        # An eager plan's kv_indptr is the backend's own buffer, which the next plan may be rewriting.
        return "plans on a stream of their own, graphs off"
    return None


def is_deterministic(server_args: Any) -> bool:
    """Was the same answer asked for whatever the batch?"""
    return bool(getattr(server_args, "enable_deterministic_inference", False))


def traced_by_compile(server_args: Any) -> str | None:
    """Which steps torch.compile traces, with stock's casts in them; None where it traces none."""
    # It compiles only what it captures.
    has_graphs = not getattr(server_args, "disable_cuda_graph", False)
    if not (has_graphs and getattr(server_args, "enable_torch_compile", False)):
        return None
    most = getattr(server_args, "torch_compile_max_bs", None)
    which = f"of up to {most} requests " if isinstance(most, int) else ""
    return f"decode steps {which}that torch.compile traces are left to stock"


def overlaps_plans() -> bool:
    """Does SGLang plan a step on a stream of its own, beside the step before it?"""
    return os.environ.get("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "0").lower() in ("1", "true", "yes", "y")


def lane(server_args: Any, kind: str) -> str:
    """Prefill and decode run at once under PD multiplexing: then each kind has its own scratch."""
    return kind if getattr(server_args, "enable_pdmux", False) else "shared"
