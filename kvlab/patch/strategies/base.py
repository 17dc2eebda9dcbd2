"""What a strategy is given and what it answers."""

from collections.abc import Callable
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


class Restart(BaseException):
    """Run SGLang's method again, for stock: what it has read by now was swapped. No Exception, as above."""


class Unfit(Exception):
    """This call is none for the strategy, which is as good as before for others. Says why, in a few words."""


class Call(Protocol):
    """One call of `forward_decode` or `forward_extend` while it runs, as a strategy sees it.

    `is_direct`: the tables are cast as they are, without a list (`attempt.is_direct`). `kept`: what a
    strategy keeps for the other layers of the pass; new metadata ends it. `undo`: what puts back what it
    swapped, newest last. `pending`: new rows that are not written yet, where the strategy said that they may
    wait. One that writes them with its cast sets it to None (`is_apart`: by a launch of their own).
    """

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
    lane: str
    lasts: bool
    is_capturing: bool
    generation: int
    is_direct: bool
    kept: dict[str, Any]
    undo: list[Callable[[], None]]
    pending: NewRows | None
    is_apart: bool

    def settle(self, clear: torch.Tensor | None = None) -> bool:
        """Write `pending` now, by itself. True where that also zeroed slot 0 of `clear`, a wide layer."""
        ...


class Strategy(Protocol):
    """`enter` runs before SGLang's method, `cast` where it casts, `call.undo` after it.

    `leaves_plan`: is the plan stock's, so that the method can run again for stock once all is undone? Outside
    of a capture another plan is made where need be. `takes_over`: may `cast` raise TakeOver?
    """

    name: str
    is_exact: bool
    leaves_plan: bool
    takes_over: bool

    def refusal(self, facts: Facts) -> str | None:
        """Why it cannot serve such calls here, or None. Cheap; nothing is allocated."""
        ...

    def note(self, facts: Facts) -> str | None:
        """What somebody who serves such calls here should know of it, or None. Said once."""
        ...

    def enter(self, call: Call) -> None:
        """What must be in place before the method reads its metadata."""
        ...

    def waits(self, call: Call, new: NewRows, joint_refusal: Callable[[Facts], str | None]) -> bool:
        """May these rows stay unwritten until the cast, which writes them? `joint_refusal`: why not in its
        own launch.
        """
        ...

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the method gets for `rows.to(dtype)`; or raise TakeOver."""
        ...


class Plain:
    """What a strategy answers where it has nothing of its own to say."""

    leaves_plan = True
    takes_over = False

    def refusal(self, facts: Facts) -> str | None:
        return None

    def note(self, facts: Facts) -> str | None:
        return None

    def enter(self, call: Call) -> None:
        return

    def waits(self, call: Call, new: NewRows, joint_refusal: Callable[[Facts], str | None]) -> bool:
        return False
