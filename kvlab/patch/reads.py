"""Which slots will this call's kernel read? One adapter per backend family.

Each answers with what the kernel itself is handed: device tensors that the host never reads, so they are
right at CUDA-graph replay too. It never looks at `req_to_token`, whose ids newer releases translate first. A
call that it does not understand is a `Stock` with a reason: that call takes stock's path and is counted.
"""

import operator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.patch import server


@dataclass(frozen=True)
class Stock:
    """Leave this call to stock, because of `reason`."""

    reason: str


@dataclass
class Reads:
    """The slots of one call: `tables[0]` is the kernel's own; cascade attention reads a second one.

    `q_indptr` int32 [bs + 1] bounds each request's query tokens, None where each has one. `causal`: as the
    kernel.
    """

    tables: list[ActiveSlots]
    q_indptr: torch.Tensor | None = None
    causal: bool = True
    is_cascade: bool = False
    # The very tensors that this was read from.
    source: tuple[Any, ...] = ()


class Adapter(Protocol):
    """What the seam asks of a backend family.

    `last`: what the call before this one read, returned where this one reads the very same tensors.
    """

    def reads(
        self, backend: Any, kind: str, layer: Any, forward_batch: Any, last: Reads | None = None
    ) -> Reads | Stock: ...

    def swap(self, backend: Any, kind: str, table: torch.Tensor) -> "Swap": ...


class Swap:
    """Hand the kernel another index table for one call. `undo` puts the very tensors back."""

    def __init__(self, targets: list[tuple[Any, str, Any]]) -> None:
        """`targets`: owner, attribute and what it is for this call; an owner without it is left alone."""
        there = [t for t in targets if hasattr(t[0], t[1])]
        self._was = [(owner, name, getattr(owner, name)) for owner, name, _ in there]
        for owner, name, value in there:
            setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, was in self._was:
            setattr(owner, name, was)


class FlashInferMLA:
    """flashinfer's `BatchMLAPagedAttentionWrapper`: token-level int32 `kv_indices`, page size 1 always.

    Lengths, by who refreshes them: an eager plan leaves fresh tensors on the wrapper. A decode graph's replay
    goes through `fast_mla_decode_plan`, which refreshes the static `kv_indices` and `backend.kv_indptr` and
    leaves the wrapper's own `_kv_indptr_buf` at its capture values. A target-verify graph's plan copies into
    the wrapper's buffers. A DFLASH verify graph refreshes no lengths on the device at all: the hook on its
    plan does (`hooks.py`).
    """

    def reads(
        self, backend: Any, kind: str, layer: Any, forward_batch: Any, last: Reads | None = None
    ) -> Reads | Stock:
        if kind == "extend" and getattr(forward_batch, "attn_dcp_metadata", None) is not None:
            return Stock("decode context parallelism")
        metadata = backend.forward_metadata
        wrapper = metadata.decode_wrapper if kind == "decode" else metadata.prefill_wrapper
        indices, indptr = wrapper._kv_indices_buf, wrapper._kv_indptr_buf
        if indices is None or indptr is None:
            return Stock("flashinfer's wrapper was not planned")
        static = backend.kv_indptr if kind == "decode" and wrapper._use_cuda_graph else None
        q_indptr = None if kind == "decode" else wrapper._qo_indptr_buf
        source = indices, indptr, static, q_indptr
        if last is not None and len(last.source) == 4 and all(map(operator.is_, last.source, source)):
            return last
        if not wrapper._use_cuda_graph and server.overlaps_plans():
            # Graphs or not: as in `server.outside`.
            return Stock("plans on a stream of their own, outside a graph")
        if static is not None:
            indptr = static[: indptr.numel()]
        if indices.dtype not in (torch.int32, torch.int64) or indptr.dtype != torch.int32:
            return Stock(f"kv_indices {indices.dtype}, kv_indptr {indptr.dtype}")
        # Not `ragged`, which checks more than a layer's call has time for.
        return Reads(
            [ActiveSlots(indices, indptr)], q_indptr=q_indptr, causal=kind == "extend", source=source
        )

    def swap(self, backend: Any, kind: str, table: torch.Tensor) -> Swap:
        wrapper = self.wrapper(backend, kind)
        # From 0.7 the wrapper hands the call to a planned backend that keeps its own reference. From 0.7.4
        # that one refuses rows that do not reach the largest page of the plan, which is the old table's.
        planned = getattr(wrapper, "_planned_backend", None)
        return Swap(
            [
                (wrapper, "_kv_indices_buf", table),
                (planned, "_kv_indices_buf", table),
                (planned, "_planned_kv_page_range", (0, 0)),
            ]
        )

    @staticmethod
    def wrapper(backend: Any, kind: str) -> Any:
        metadata = backend.forward_metadata
        return metadata.decode_wrapper if kind == "decode" else metadata.prefill_wrapper


class FlashAttention:
    """FA3's `flash_attn_with_kvcache`: `page_table` int32 [bs, pages] of page ids, lengths in
    `cache_seqlens`.

    Captured calls read static tables whose padded rows and stale tails the lengths cut off.
    """

    def reads(
        self, backend: Any, kind: str, layer: Any, forward_batch: Any, last: Reads | None = None
    ) -> Reads | Stock:
        metadata = backend.forward_metadata
        if getattr(backend, "attn_cp_size", 1) > 1 and kind == "extend":
            return Stock("context parallelism")
        if getattr(forward_batch, "dcp_kv_mask", None) is not None:
            return Stock("decode context parallelism")
        window = getattr(layer, "sliding_window_size", None)
        if window is not None and window > -1:
            return Stock("sliding window")
        if getattr(backend, "has_local_attention", False) and getattr(layer, "use_irope", False):
            return Stock("local attention")
        if getattr(layer, "is_cross_attention", False):
            return Stock("cross attention")
        page_size = backend.page_size
        tables = [metadata.page_table]
        lengths = [metadata.cache_seqlens_int32]
        is_cascade = _is_cascade(backend, kind, forward_batch)
        if is_cascade:
            if page_size > 1:
                return Stock("cascade attention with pages over 1")
            expand = backend.forward_metadata_spec_decode_expand
            tables.append(expand.page_table)
            lengths.append(expand.cache_seqlens_int32)
        source = *tables, *lengths, metadata.cu_seqlens_q, page_size
        is_last = last is not None and len(last.source) == len(source)
        if is_last and all(map(operator.is_, last.source, source)):
            return last
        if any(t is None for t in (*tables, *lengths)):
            return Stock("no page table in the metadata")
        if any(t.dtype != torch.int32 for t in (*tables, *lengths)):
            return Stock(f"page table {tables[0].dtype}, lengths {lengths[0].dtype}")
        if any(len(t) < len(n) for t, n in zip(tables, lengths, strict=True)):
            return Stock("fewer page table rows than lengths")
        pairs = zip(tables, lengths, strict=True)
        return Reads(
            [ActiveSlots.paged(t[: len(n)], n, page_size) for t, n in pairs],
            q_indptr=metadata.cu_seqlens_q,
            causal=not is_cascade,
            is_cascade=is_cascade,
            source=source,
        )

    def swap(self, backend: Any, kind: str, table: torch.Tensor) -> Swap:
        return Swap([(backend.forward_metadata, "page_table", table)])


def _is_cascade(backend: Any, kind: str, forward_batch: Any) -> bool:
    if getattr(backend, "topk", 0) <= 1:
        return False
    if kind == "decode":
        return forward_batch.spec_info is not None
    return forward_batch.forward_mode.is_target_verify()


ADAPTERS: dict[str, Adapter] = {"flashinfer_mla": FlashInferMLA(), "fa3": FlashAttention()}
