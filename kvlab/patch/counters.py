"""What did the patch do? Host integers only: the device is never asked.

Python does not run when a CUDA graph is replayed. What a captured pass did is kept under its graph's key, and
the metadata hook, which does run before each replay, adds it again.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Pass:
    """What one captured pass does each time it is replayed."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    slots: int = 0
    row_bytes: int = 0
    avoided_layers: int = 0


class Counters:
    """Calls per site and strategy, fallbacks by reason, and the bytes of casts that did not happen.

    A full cast reads each row once and writes it twice as wide: three row widths a slot. `bytes_avoided` is
    that for the whole pool less that for the tokens which the batch reads.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.pid = os.getpid()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.bytes_avoided = 0
        self.writes: Counter[str] = Counter()
        self._captured: dict[Any, Pass] = {}

    def call(
        self, site: str, strategy: str, slots: int, row_bytes: int, tokens: int | None, graph: Any = None
    ) -> None:
        """One call. `graph`: the key of the pass being captured, None when the call really runs."""
        if graph is None:
            self.calls[site, strategy] += 1
            if strategy != "stock" and tokens is not None and tokens < slots:
                self.bytes_avoided += 3 * row_bytes * (slots - tokens)
            return
        kept = self._captured.setdefault(graph, Pass())
        kept.calls[site, strategy] += 1
        if strategy != "stock":
            kept.slots, kept.row_bytes = slots, row_bytes
            kept.avoided_layers += 1

    def fallback(self, reason: str, *, graph: Any = None) -> None:
        if graph is None:
            self.fallbacks[reason] += 1
        else:
            self._captured.setdefault(graph, Pass()).fallbacks[reason] += 1

    def capture(self, graph: Any) -> None:
        """A pass of this key is about to be captured, again perhaps."""
        self._captured.pop(graph, None)

    def replay(self, graph: Any, tokens: int | None) -> None:
        """The graph of this key is about to be replayed on a batch of `tokens` cached tokens."""
        kept = self._captured.get(graph)
        if kept is None:
            return
        # By hand: before every replay, and Counter.update asks for more than two counters take.
        for call, n in kept.calls.items():
            self.calls[call] += n
        for reason, n in kept.fallbacks.items():
            self.fallbacks[reason] += n
        if tokens is not None:
            self.bytes_avoided += kept.avoided_layers * avoided(kept.slots, kept.row_bytes, tokens)

    def as_dict(self) -> dict[str, Any]:
        calls: dict[str, dict[str, int]] = {}
        for (site, strategy), n in sorted(self.calls.items()):
            calls.setdefault(site, {})[strategy] = n
        return {
            "calls": calls,
            "fallbacks": dict(sorted(self.fallbacks.items())),
            "bytes_avoided": self.bytes_avoided,
            "kv_writes": dict(sorted(self.writes.items())),
        }


def avoided(slots: int, row_bytes: int, tokens: int) -> int:
    """Bytes that a cast of `tokens` rows moves less than one of `slots` rows; never negative."""
    return 3 * row_bytes * max(slots - tokens, 0)
