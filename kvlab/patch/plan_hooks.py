"""What must happen around flashinfer's plans: they take turns, a verify's lengths stay fresh, `native` plans.

These run on the host before every replay of a decode or verify graph, so each does what it must and no more.
"""

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from kvlab.patch.replacements import Replacements
from kvlab.patch.runtime import Runtime
from kvlab.patch.scratch import is_capturing

if TYPE_CHECKING:
    from kvlab.patch.strategies.native import FP8Plans


def patch_plans(runtime: Runtime, module: ModuleType, mine: Replacements) -> None:
    """DFLASH verify's plan leaves no lengths on the device; `native` needs another KV dtype."""
    fast_plan = vars(module).get("fast_mla_decode_plan")
    if callable(fast_plan):

        def keep() -> None:
            # Graphs of a verify step that were captured meanwhile go on reading what only we refresh. Under
            # what somebody else put on top of ours, ours is still called.
            is_back = module.fast_mla_decode_plan is fast_plan
            if is_back and runtime.has_captured and runtime.is_refreshing:
                module.fast_mla_decode_plan = _refreshing(runtime, fast_plan)

        mine.on_undo(keep)
        mine.set(module, "fast_mla_decode_plan", _refreshing(runtime, _in_turn(fast_plan)))
    updater = getattr(module, "FlashInferMLAIndicesUpdaterDecode", None)
    begin = vars(updater).get("call_begin_forward") if isinstance(updater, type) else None
    # No policy takes it: only its own name does.
    if callable(begin) and runtime.asked == "native":
        from kvlab.patch.strategies.native import FP8Plans

        plans = FP8Plans(runtime)
        mine.set(updater, "call_begin_forward", _native_plan(runtime, begin, plans))
        mine.on_undo(plans.undo)


def _in_turn(fast_plan: Callable[..., None]) -> Callable[..., None]:
    """The plan of a replay, once the one before it has left the host.

    flashinfer writes every plan into the same pinned memory and queues a copy of it to the device. Where the
    host runs ahead of the GPU, the next plan overwrites one that is still to be copied, and steps attend by
    later steps' lengths: they read an entry of `kv_indices` past their own. Patched or not.
    """
    copied: weakref.WeakKeyDictionary[Any, torch.cuda.Event] = weakref.WeakKeyDictionary()

    @functools.wraps(fast_plan)
    def plan(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        # Graphs that were captured meanwhile call this after `remove()` too, and are waited for as before.
        device = getattr(wrapper, "device", None)
        if getattr(device, "type", None) != "cuda" or is_capturing(device):
            fast_plan(wrapper, *args, **kwargs)
            return
        event = copied.get(wrapper)
        if event is None:
            event = copied[wrapper] = torch.cuda.Event()
        elif not event.query():
            # Asked first: waiting lets go of Python's lock and takes it again, also where there is no need.
            event.synchronize()
        fast_plan(wrapper, *args, **kwargs)
        event.record(_current_stream(device))

    return plan


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """`torch.cuda.current_stream(device)`, which makes a new object at every call: here it is kept."""
    try:
        which = torch._C._cuda_getCurrentStream(device.index)
    except (AttributeError, RuntimeError, TypeError):  # torch has no such name, `device` no index
        return torch.cuda.current_stream(device)
    found = _streams.get(which)
    if found is None:
        found = _streams[which] = torch.cuda.current_stream(device)
    return found


def _refreshing(runtime: Runtime, fast_plan: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(fast_plan)
    def plan(wrapper: Any, qo_indptr_cpu: Any, kv_indptr_cpu: Any, *args: Any, **kwargs: Any) -> None:
        fast_plan(wrapper, qo_indptr_cpu, kv_indptr_cpu, *args, **kwargs)
        # Decode's lengths are read from backend.kv_indptr, which is fresh; a verify plan (causal) has no such
        # tensor. Beside the copy of kv_indices, on the same stream.
        is_causal = kwargs.get("causal", args[6] if len(args) > 6 else False)
        if is_causal:
            runtime.is_refreshing = True
            wrapper._kv_indptr_buf.copy_(kv_indptr_cpu, non_blocking=True)
            wrapper._qo_indptr_buf.copy_(qo_indptr_cpu, non_blocking=True)

    return plan


def _native_plan(runtime: Runtime, begin: Callable[..., Any], plans: "FP8Plans") -> Callable[..., Any]:
    @functools.wraps(begin)
    def call_begin_forward(self: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        kv_dtype = runtime.native_kv_dtype(getattr(self, "attn_backend", None))
        if kv_dtype is None:
            plans.forget(wrapper)
            return begin(self, wrapper, *args, **kwargs)
        from kvlab.patch.strategies.native import Planning

        return begin(self, Planning(wrapper, plans, kv_dtype), *args, **kwargs)

    return call_begin_forward
