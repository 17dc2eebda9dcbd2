"""What did the patch do? Host integers only: the device is never asked.

Python does not run when a CUDA graph is replayed. What a captured pass did is kept under its graph's key; the
metadata hook, which does run before each replay, counts the replay, and who reads the counters multiplies.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Pass:
    """What one captured pass does each time it is replayed, how often that was, and in all these replays the
    slots of a layer that were not cast.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    slots: int = 0
    row_bytes: int = 0
    avoided_layers: int = 0
    replays: int = 0
    slots_left: int = 0

    @property
    def bytes_avoided(self) -> int:
        return 3 * self.row_bytes * self.avoided_layers * self.slots_left


class Counters:
    """Calls per site and strategy, fallbacks by reason, and the bytes of casts that did not happen.

    A full cast reads each row once and writes it twice as wide: three row widths a slot. `bytes_avoided` is
    that for the whole pool less that for the tokens which the batch reads. The attributes count what ran;
    `as_dict` adds what is replayed.
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
        """A pass of this key is about to be captured, again perhaps: what the one before did is kept."""
        kept = self._captured.pop(graph, None)
        if kept is not None:
            _add(kept, self.calls, self.fallbacks)
            self.bytes_avoided += kept.bytes_avoided

    def replay(self, graph: Any, tokens: int | None) -> None:
        """The graph of this key is about to be replayed on a batch of `tokens` cached tokens."""
        kept = self._captured.get(graph)
        if kept is None:
            return
        kept.replays += 1
        if tokens is not None and tokens < kept.slots:
            kept.slots_left += kept.slots - tokens

    def as_dict(self) -> dict[str, Any]:
        every, fallbacks = Counter(self.calls), Counter(self.fallbacks)
        replayed = [kept for kept in list(self._captured.values()) if kept.replays]
        for kept in replayed:
            _add(kept, every, fallbacks)
        calls: dict[str, dict[str, int]] = {}
        for (site, strategy), n in sorted(every.items()):
            calls.setdefault(site, {})[strategy] = n
        return {
            "calls": calls,
            "fallbacks": dict(sorted(fallbacks.items())),
            "bytes_avoided": self.bytes_avoided + sum(kept.bytes_avoided for kept in replayed),
            "kv_writes": dict(sorted(self.writes.items())),
        }


def _add(kept: Pass, calls: Counter[tuple[str, str]], fallbacks: Counter[str]) -> None:
    """What the replays of a captured pass did."""
    if kept.replays:
        calls.update({call: n * kept.replays for call, n in kept.calls.items()})
        fallbacks.update({reason: n * kept.replays for reason, n in kept.fallbacks.items()})
