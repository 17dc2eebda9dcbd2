"""What happens to a step when somebody changes what its plan knew? Each experiment is one question.

All run the released code of `release.Server`, with kvlab.patch's own seam and strategies in front of it, and
compare with stock's full cast bit by bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvlab.backends.sources import Tree
from kvlab.kernels.active import ActiveSlots
from kvlab.patch.reads import ADAPTERS, FlashInferMLA, Reads, Stock
from kvlab.patch.runtime import Runtime
from kvlab.patch.sites import RECOGNISED, Site
from kvlab.patch.strategies import Call, Plain, Strategy
from kvlab.patch.strategies.shadow import Shadow
from kvlab.plans.release import Server
from kvlab.plans.results import Buffer, Careless, Decorated, Reading, Shared, Variant

_SITE = Site(
    "flashinfer_mla",
    "decode",
    "sglang.srt.layers.attention.flashinfer_mla_backend",
    "FlashInferMLAAttnBackend",
    RECOGNISED,
    holder="forward_batch",
)
LENGTHS = (5, 17, 9)
SLOTS = 256


def stale(sglang: Tree, flashinfer: Tree) -> tuple[list[Buffer], list[Reading]]:
    """Which lengths are fresh after a replay, and what a cast makes of those that are not."""
    buffers: list[Buffer] = []
    readings = []
    for aliased in (False, True):
        for name, adapter in (("the wrapper's", _WrapperLengths()), ("the backend's", FlashInferMLA())):
            server = Server(sglang, flashinfer, slots=SLOTS, requests=_requests(LENGTHS))
            server.capture([1] * len(LENGTHS), aliased=aliased)
            was = _lengths_of(server)
            server.replay(LENGTHS)
            now = _lengths_of(server)
            bounds = list(itertools.accumulate(LENGTHS, initial=0))
            slots = [s for its in _requests(LENGTHS) for s in its]
            true = {
                "wrapper._kv_indptr_buf": bounds,
                "wrapper._kv_len_arr_buf": list(LENGTHS),
                "wrapper._kv_indices_buf": slots,
                "backend.kv_indptr": bounds,
                "the plan's schedule": bounds,
            }
            if not aliased and not buffers:
                buffers = [Buffer(name=n, captured=was[n], replayed=now[n], true=t) for n, t in true.items()]
            stock = server.attend()
            noted: list[int] = []
            shadow = _Noting(noted)
            seam = Seam(shadow, server, adapter, graphs=True)
            got = server.attend(seam)
            layer = server.pool.kv_buffer[0]
            readings.append(
                Reading(
                    lengths=name,
                    aliased=aliased,
                    cast_rows=noted[0],
                    read_rows=len(slots),
                    is_same=_same(got, stock),
                    error=_error(got, stock),
                    kept_bytes=seam.runtime.scratch.nbytes(),
                    stock_bytes=layer.numel() * torch.bfloat16.itemsize,
                )
            )
    return buffers, readings


def variants(sglang: Tree, flashinfer: Tree) -> list[Variant]:
    """The text's variants and two more, each for two steps."""
    found = []
    for layout, gap in (("every other slot", 2), ("neighbouring slots", 1)):
        for name in ("in place", "replan", "gather", "shadow"):
            if gap == 1 and name != "in place":
                continue
            server = Server(sglang, flashinfer, slots=SLOTS, requests=_requests(LENGTHS, gap=gap))
            before = [b.clone() for b in server.pool.kv_buffer]
            server.eager(LENGTHS)
            stock = server.attend()
            strategy = InPlace() if name == "in place" else name
            seam = Seam(strategy, server)
            table, plans = server.table.clone(), server.plans()
            first = server.attend(seam)
            plans = server.plans() - plans
            # The next step plans for itself, as a server's does.
            server.eager(LENGTHS)
            indices = server.wrapper._kv_indices_buf
            values = indices.clone()
            second = server.attend(seam)
            is_kept = server.wrapper._kv_indices_buf is indices and torch.equal(indices, values)
            pool = zip(before, server.pool.kv_buffer, strict=True)
            found.append(
                Variant(
                    name=name,
                    layout=layout,
                    first_is_same=_same(first, stock),
                    second_is_same=_same(second, stock),
                    pool_bytes_changed=sum(int((a != b).sum()) for a, b in pool),
                    pool_bytes=sum(b.numel() for b in before),
                    plans_per_step=plans,
                    layers=len(server.layers),
                    kept_bytes=seam.runtime.scratch.nbytes(),
                    tables_as_before=is_kept and torch.equal(server.table, table),
                )
            )
    return found


def shared(sglang: Tree, flashinfer: Tree, *, requests: int = 64, prefix: int = 48) -> list[Shared]:
    """Requests on one radix prefix: how many wide rows each strategy makes."""
    found = []
    for name in ("replan", "gather", "shadow"):
        its = [list(range(1, prefix + 1))] * requests
        server = Server(sglang, flashinfer, slots=SLOTS, requests=its, layers=1, heads=1)
        server.eager([prefix] * requests)
        stock = server.attend()
        rows: list[int] = []
        got = server.attend(Seam(name, server, noted=rows))
        found.append(
            Shared(
                name=name,
                requests=requests,
                prefix=prefix,
                pool_slots=server.pool.slots,
                rows=rows[0],
                cast=rows[1],
                is_same=_same(got, stock),
            )
        )
    return found


def careless(sglang: Tree, flashinfer: Tree) -> Careless:
    """The gathered rows without new indices: what `run` says to a buffer that its indices do not fit."""
    server = Server(sglang, flashinfer, slots=SLOTS, requests=_requests(LENGTHS, first=SLOTS // 2), layers=1)
    server.eager(LENGTHS)
    slots = server.wrapper._kv_indices_buf.long()
    compact = server.pool.get_key_buffer(0).view(torch.uint8)[slots].view(server.pool.dtype).bfloat16()
    q, q_rope = server.queries[0]
    try:
        server.wrapper.run(q, q_rope, compact[..., : q.shape[-1]], compact[..., q.shape[-1] :])
        raised = ""
    except Exception as e:
        raised = type(e).__name__
    return Careless(
        compact_rows=len(compact),
        largest_index=int(slots.max()),
        past_the_end=server.kernels[-1].past_the_end,
        raised=raised,
    )


def decorated(flashinfer: Tree) -> Decorated:
    """The decorator itself, applied to a small class of the wrapper's name."""
    module = flashinfer.module("flashinfer/api_logging.py")
    assert module is not None
    said: list[str] = []

    class Log:
        debug = staticmethod(said.append)
        error = staticmethod(said.append)

    def decorator(level: int) -> Callable[..., Any]:
        scope = {
            "functools": functools,
            "_API_LOG_LEVEL": level,
            "_logger": Log,
            "_get_timestamp": lambda: "",
        }
        return module.real("flashinfer_api", scope)

    def run(self: Any, x: int) -> int:
        return x + 1

    silent, logging = decorator(0)(run), decorator(1)(run)
    wrapper = type("BatchMLAPagedAttentionWrapper", (), {"run": logging})()
    result = wrapper.run(1)
    return Decorated(
        is_the_function=silent is run,
        unwraps_to_the_function=logging.__wrapped__ is run,
        result_is_the_function_s=result == run(None, 1),
        logged=said[0].strip(),
    )


class InPlace(Plain):
    """The text's first variant: the wide row goes where the FP8 row is, over it and over its neighbour."""

    name = "in place"
    is_exact = False

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raw = rows.view(torch.uint8).squeeze(1)
        slots, width = raw.shape
        wide = torch.as_strided(raw.view(-1).view(dtype), (slots - 1, width), (width // 2, 1))
        slot = call.reads.tables[0].distinct(slots)
        wide[slot] = raw[slot].view(rows.dtype).to(dtype)
        return wide.unsqueeze(1)


class _Noting(Shadow):
    """Shadow that notes how many distinct rows it casts."""

    def __init__(self, noted: list[int]) -> None:
        super().__init__()
        self._noted = noted

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._noted.append(call.reads.tables[0].distinct(rows.shape[0]).numel())
        return super().cast(call, rows, dtype)


class _WrapperLengths(FlashInferMLA):
    """The naive reading: the wrapper's own lengths."""

    def reads(
        self, backend: Any, kind: str, layer: Any, forward_batch: Any, last: Reads | None = None
    ) -> Reads | Stock:
        wrapper = self.wrapper(backend, kind)
        return Reads([ActiveSlots.ragged(wrapper._kv_indices_buf, wrapper._kv_indptr_buf)])


class Seam:
    """kvlab.patch's own seam with one strategy in it, before a release's `forward_decode`."""

    def __init__(
        self,
        strategy: str | Strategy,
        server: Server,
        adapter: Any = None,
        *,
        graphs: bool = False,
        noted: list[int] | None = None,
    ) -> None:
        name = strategy if isinstance(strategy, str) else "shadow"
        self.runtime = Runtime(name, is_strict=False, version=None)
        self._adapter = adapter
        if not isinstance(strategy, str):
            self.runtime.strategies[name] = strategy
        if noted is not None:
            self._note(name, noted)
        if graphs:
            self.runtime.graphs_ready(_SITE.family, server.backend)

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        kept = ADAPTERS["flashinfer_mla"]
        ADAPTERS["flashinfer_mla"] = self._adapter or kept
        try:
            out = self.runtime.call(_SITE, original, *args, **kwargs)
        finally:
            ADAPTERS["flashinfer_mla"] = kept
        if fallbacks := self.runtime.counters.as_dict()["fallbacks"]:
            raise AssertionError(f"fell back to stock: {fallbacks}")
        return out

    def _note(self, name: str, noted: list[int]) -> None:
        """Append the wide buffer's rows, and how many of them the index buffer names, at each cast."""
        real = self.runtime.strategies[name].cast

        def cast(call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            wide = real(call, rows, dtype)
            indices = FlashInferMLA.wrapper(call.backend, call.kind)._kv_indices_buf
            noted.extend((wide.shape[0], indices.unique().numel()))
            return wide

        self.runtime.strategies[name].cast = cast  # type: ignore[method-assign]


def _requests(lengths: Sequence[int], *, gap: int = 2, first: int = 2) -> list[list[int]]:
    """Slots for each request: one after another, `gap` apart."""
    found = []
    for n in lengths:
        found.append([first + gap * i for i in range(n)])
        first = found[-1][-1] + gap
    return found


def _lengths_of(server: Server) -> dict[str, list[int]]:
    """Every tensor that a reader could take for what is active."""
    batch, wrapper = server.batch, server.wrapper
    words = wrapper._int_workspace_buffer.view(torch.int32)
    return {
        "wrapper._kv_indptr_buf": wrapper._kv_indptr_buf.tolist(),
        "wrapper._kv_len_arr_buf": wrapper._kv_len_arr_buf.tolist(),
        "wrapper._kv_indices_buf": wrapper._kv_indices_buf[: sum(LENGTHS)].tolist(),
        "backend.kv_indptr": server.backend.kv_indptr.tolist(),
        "the plan's schedule": words[batch + 2 : 2 * batch + 3].tolist(),
    }


def _same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    pairs = zip(got, want, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def _error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Relative, over all layers; three digits, so that two hosts say the same."""
    a, b = torch.cat(list(got)).float(), torch.cat(list(want)).float()
    return float(f"{((a - b).norm() / b.norm()).item():.2g}")
