"""Is this call one more layer of the pass through the model that the call before it belonged to?

What a pass reads is the same for all its layers, so which slots those are is found out once. A pass ends
where anything says that the next call may read other slots.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.patch.strategies.base import Call


@dataclass
class Pass:
    """`layers`: how many were seen so far; `layers_before`: how many the pass before it had.

    `found`: what its strategy keeps, at first what the pass before left; `written`: whose slots it left out
    of that, because each layer writes them. `is_graph_s`: `found` was made inside a capture, so the replays
    of that graph zero it, and nobody else may count on that.
    """

    generation: int
    metadata: Any
    is_capturing: bool
    tables: tuple[tuple[int, ...], ...]
    last_layer: int
    layers: int = 1
    layers_before: int = 0
    found: Any = None
    written: torch.Tensor | None = None
    is_graph_s: bool = False


class Passes:
    """The latest pass of each backend, call kind and lane."""

    def __init__(self) -> None:
        self._latest: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Pass]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, call: Call) -> Pass:
        """The pass that this call belongs to; `layers` is 1 where the call begins it."""
        of_backend = self._latest.setdefault(call.backend, {})
        key = call.kind, call.lane
        last, layer = of_backend.get(key), call.layer.layer_id
        metadata, tables = call.backend.forward_metadata, _where(call)
        if (
            last is not None
            and last.generation == call.generation
            and last.metadata is metadata
            and last.is_capturing == call.is_capturing
            and last.tables == tables
            and layer > last.last_layer
        ):
            last.last_layer = layer
            last.layers += 1
            return last
        fresh = Pass(call.generation, metadata, call.is_capturing, tables, layer)
        if last is not None:
            fresh.layers_before = last.layers
            fresh.found = None if last.is_graph_s else last.found
        of_backend[key] = fresh
        return fresh

    def latest(self, call: Call) -> Pass:
        """The pass that `of` put this call into."""
        return self._latest[call.backend][call.kind, call.lane]


def _where(call: Call) -> tuple[tuple[int, ...], ...]:
    """Where the tables lie and how large they are: another buffer may name other slots."""
    return tuple(
        (a.table.data_ptr(), a.bounds.data_ptr(), a.page_size, *a.table.shape, *a.bounds.shape)
        for a in call.reads.tables
    )
