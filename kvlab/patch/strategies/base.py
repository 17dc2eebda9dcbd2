"""What a strategy is given and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvlab.patch.policy import Facts
from kvlab.patch.reads import Adapter, Reads
from kvlab.patch.scratch import Scratch
from kvlab.patch.write import NewRows


class TakeOver(BaseException):
    """Leave SGLang's method after the KV write: `compute()` is what it would have returned.

    Not an Exception, so that a handler in SGLang's method cannot swallow it.
    """

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self.compute = compute


def nothing() -> None:
    """What there is to settle where nothing waits."""


@dataclass
class Call:
    """One call of `forward_decode` or `forward_extend` while it runs.

    `pending`: new rows that are not written yet, handed only to strategies that have `is_joint`. One that
    writes them with its cast sets it to None; `settle()` writes them by themselves.
    """

    site: str
    kind: str
    adapter: Adapter
    backend: Any
    layer: Any
    forward_batch: Any
    q: torch.Tensor
    q_rope: torch.Tensor | None
    reads: Reads
    facts: Facts
    scratch: Scratch
    lane: str = "shared"
    lasts: bool = False
    is_capturing: bool = False
    generation: int = 0
    undo: list[Callable[[], None]] = field(default_factory=list)
    pending: NewRows | None = None
    settle: Callable[[], None] = nothing


class Strategy(Protocol):
    """`enter` runs before SGLang's method, `cast` where it casts, `call.undo` after it."""

    name: str
    is_exact: bool

    def refusal(self, facts: Facts) -> str | None:
        """Why it cannot serve such calls here, or None. Cheap; nothing is allocated."""
        ...

    def note(self, facts: Facts) -> str | None:
        """What somebody who serves such calls here should know of it, or None. Said once."""
        ...

    def enter(self, call: Call) -> None:
        """What must be in place before the method reads its metadata."""
        ...

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the method gets for `rows.to(dtype)`; or raise TakeOver."""
        ...
