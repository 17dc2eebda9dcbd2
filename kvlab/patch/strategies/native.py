"""flashinfer's own FP8 path, where the installed one has it: SM90, BF16 queries, e4m3 rows, flashinfer >=
0.6.14.

SGLang plans with one dtype for Q and KV. The KV argument alone is changed at each full plan (`plan_kv_dtype`;
the fast plan of a replay keeps the module that the first plan compiled), and `run` is given the scales that
FP8 needs.
"""

import contextlib
import inspect
from collections.abc import MutableMapping
from typing import Any

import torch

from kvlab.patch.policy import Facts
from kvlab.patch.reads import FlashInferMLA
from kvlab.patch.strategies.base import Call, Plain, Unfit


class Native(Plain):
    name = "native"
    is_exact = False
    leaves_plan = False

    def refusal(self, facts: Facts) -> str | None:
        if facts.family != "flashinfer_mla":
            return "fa3 takes no FP8 rows at this head size"
        if facts.kind != "decode":
            return "decode only"
        if facts.fp8 != torch.float8_e4m3fn or facts.q_dtype != torch.bfloat16:
            return f"flashinfer takes BF16 with e4m3 only, not {facts.q_dtype} with {facts.fp8}"
        if facts.rank not in (None, 512):
            return f"flashinfer takes kv_lora_rank 512 only, not {facts.rank}"
        if facts.device.type == "cuda" and torch.cuda.get_device_capability(facts.device)[0] != 9:
            return "flashinfer's FP8 MLA is for SM90"
        return flashinfer_refusal()

    def enter(self, call: Call) -> None:
        wrapper = FlashInferMLA.wrapper(call.backend, call.kind)
        if getattr(wrapper, "_kv_data_type", None) != call.facts.fp8:
            raise Unfit("planned for wide rows")
        metadata = call.backend.forward_metadata
        metadata.decode_wrapper = _WithScales(wrapper)

        def back() -> None:
            metadata.decode_wrapper = wrapper

        call.undo.append(back)

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows


class _WithScales:
    """A wrapper whose `run` passes the scales that rows stored unscaled have: one."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper.run(*args, **kwargs, ckv_scale=1.0, kpe_scale=1.0)


class PlanKV:
    """A wrapper whose full plan gets `kv_dtype` for its last argument; a fast plan has no use for it.

    `planned`: where an eager plan's own arguments are kept, by wrapper, for `plan_again`.
    """

    def __init__(
        self, wrapper: Any, kv_dtype: torch.dtype, planned: MutableMapping[Any, Any] | None = None
    ) -> None:
        self._wrapper, self._kv_dtype, self._planned = wrapper, kv_dtype, planned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def plan(self, *args: Any) -> Any:
        if self._planned is not None and not getattr(self._wrapper, "_use_cuda_graph", False):
            self._planned[self._wrapper] = args
        return self._wrapper.plan(*args[:-1], self._kv_dtype)


def plan_again(planned: MutableMapping[Any, Any]) -> None:
    """Give the step that was planned for FP8 rows, and not run yet, stock's plan: stock runs it."""
    while planned:
        wrapper, args = planned.popitem()
        # A library that refuses says so again when the step runs; what is being undone goes on.
        with contextlib.suppress(Exception):
            wrapper.plan(*args)


def flashinfer_refusal() -> str | None:
    """Why the installed flashinfer has no FP8 MLA, or None."""
    try:
        from flashinfer import BatchMLAPagedAttentionWrapper
    except ImportError as e:
        return f"flashinfer does not import: {e}"
    if "ckv_scale" not in inspect.signature(BatchMLAPagedAttentionWrapper.run).parameters:
        return "the installed flashinfer has no FP8 rows in MLA (0.6.14 is the first)"
    return None
