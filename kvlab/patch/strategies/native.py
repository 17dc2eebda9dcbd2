"""flashinfer's own FP8 path, where the installed one has it: SM90, BF16 queries, e4m3 rows, flashinfer >=
0.6.14.

SGLang plans with one dtype for Q and KV. The KV argument alone is changed at each full plan (`FP8Plans`; the
fast plan of a replay keeps the module that the first plan compiled), and `run` is given the scales that FP8
needs. Which call asks for wide rows after all is known when it runs: then stock's plan is made.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch

from kvlab.kernels.checks import FP8_DTYPES
from kvlab.patch.policy import Facts
from kvlab.patch.reads import FlashInferMLA
from kvlab.patch.scratch import is_capturing
from kvlab.patch.strategies.base import Call, Plain, Unfit

if TYPE_CHECKING:
    from kvlab.patch.runtime import Runtime


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


class FP8Plans:
    """Decode plans that were made for FP8 rows, and how stock's come in their place.

    By wrapper, stock's arguments of the plan that its next `run` goes by; none of a graph that is replayed,
    which no `run` comes to any more.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._made: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()

    def plan(self, kv_dtype: torch.dtype, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        """`wrapper.plan`, whose last argument is the KV dtype, for rows of `kv_dtype`.

        Stock's where flashinfer refuses them.
        """
        self.forget(wrapper)
        if kwargs or not args or not isinstance(args[-1], torch.dtype):
            # Not the call that is known.
            return wrapper.plan(*args, **kwargs)
        # SGLang puts the fast plan of replays on the wrapper itself.
        is_replay = "plan" in vars(wrapper)
        try:
            done = wrapper.plan(*args[:-1], kv_dtype)
        except Exception as e:
            if is_replay:
                raise
            done = wrapper.plan(*args)
            self._runtime.counters.fallback("native failed")
            self._runtime.broke("native", e, "stock's plan serves the step")
            return done
        if not is_replay:
            self._made[wrapper] = args
            wrapper.run = functools.partial(self._run, weakref.ref(wrapper))
        return done

    def forget(self, wrapper: Any) -> None:
        """The wrapper is planned anew."""
        if self._made.pop(wrapper, None) is not None:
            vars(wrapper).pop("run", None)

    def undo(self) -> None:
        """Give the steps that were planned, and not run yet, stock's plan."""
        for wrapper in list(self._made):
            if not getattr(wrapper, "_use_cuda_graph", False):
                # A library that refuses says so again when the step runs; what is being undone goes on.
                with contextlib.suppress(Exception):
                    self._plan_again(wrapper)
            self.forget(wrapper)

    def _run(self, of: weakref.ref[Any], *args: Any, **kwargs: Any) -> Any:
        """What `wrapper.run` is until the next plan. `args`: q_nope, q_pe, ckv_cache and others."""
        wrapper = of()
        rows = args[2] if len(args) > 2 else kwargs.get("ckv_cache")
        if rows is not None and rows.dtype not in FP8_DTYPES:
            if is_capturing(rows.device):
                raise RuntimeError(
                    "kvlab: a graph planned for FP8 rows is captured with wide ones, and no plan can be made "
                    "inside a capture; start without KVLAB_PATCH=native"
                )
            self._plan_again(wrapper)
            self.forget(wrapper)
            self._runtime.counters.fallback("planned for FP8 rows")
            self._runtime.say(
                "native: a step planned for FP8 rows came with wide ones; stock's plan serves it"
            )
        return type(wrapper).run(wrapper, *args, **kwargs)

    def _plan_again(self, wrapper: Any) -> None:
        # The class's: a graph's wrapper has the fast plan in its place by now.
        type(wrapper).plan(wrapper, *self._made[wrapper])


class Planning:
    """A wrapper whose plan goes through `FP8Plans.plan`."""

    def __init__(self, wrapper: Any, plans: FP8Plans, kv_dtype: torch.dtype) -> None:
        self._wrapper = wrapper
        self.plan = functools.partial(plans.plan, kv_dtype, wrapper)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)


def flashinfer_refusal() -> str | None:
    """Why the installed flashinfer has no FP8 MLA, or None."""
    try:
        from flashinfer import BatchMLAPagedAttentionWrapper
    except ImportError as e:
        return f"flashinfer does not import: {e}"
    if "ckv_scale" not in inspect.signature(BatchMLAPagedAttentionWrapper.run).parameters:
        return "the installed flashinfer has no FP8 rows in MLA (0.6.14 is the first)"
    return None
