"""Which strategies, and which launches of ours, may serve here? Each is checked once, before it is trusted.

A check compares with stock's own result on this host (selfcheck). None is made inside a capture, and what
failed while serving is not asked again.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvlab.patch import casts, selfcheck, write
from kvlab.patch.policy import Facts
from kvlab.patch.saying import one_line
from kvlab.patch.scratch import is_capturing
from kvlab.patch.strategies import Strategy

# By a pool's id, which another may have after it: that pool, and why its writes stay stock's.
Writes = dict[int, tuple[weakref.ref[Any], str | None]]


class Trust:
    """What was found of the `strategies` of this process; `warn` says a line once."""

    def __init__(self, strategies: dict[str, Strategy], warn: Callable[[str], None]) -> None:
        self._strategies, self._warn = strategies, warn
        # Why a strategy is not used again.
        self.broken: dict[str, str] = {}
        self._checked: dict[tuple[Any, ...], str | None] = {}
        # What failed, by cause, while `together`.
        self._failed: dict[str, list[str]] | None = None

    def refusal(self, strategy: str, facts: Facts) -> str | None:
        """Why `strategy` may not have such calls, or None."""
        if strategy in self.broken:
            return self.broken[strategy]
        why = self._strategies[strategy].refusal(facts)
        if why is not None:
            return why
        key = (strategy, facts.device, facts.fp8, facts.q_dtype, facts.width, facts.page_size)
        if strategy == "fused":
            key = (*key, facts.heads, facts.rank)
        if key not in self._checked:
            if is_capturing(facts.device):
                return "not checked before capture"
            wrong = self._check(strategy, facts.device, functools.partial(selfcheck.check, strategy, facts))
            self._checked[key] = None if wrong is None else f"self-check failed: {wrong}"
            if wrong is None and (note := self._strategies[strategy].note(facts)) is not None:
                self._warn(f"{strategy} on {facts.device}: {note}")
        return self._checked[key]

    def write_refusal(self, pool: Any, facts: Facts, writes: Writes) -> str | None:
        """Why this pool's KV writes stay stock's, or None; asked once a pool and kept in `writes`."""
        known = writes.get(id(pool))
        if known is None or known[0]() is not pool:
            why = write.refusal(pool)
            if why is None:
                checked = ("write", facts.device, facts.fp8, facts.q_dtype, facts.width)
                if checked not in self._checked:
                    if is_capturing(facts.device):
                        return "not checked before capture"
                    check = functools.partial(selfcheck.check_write, facts)
                    self._checked[checked] = self._check("the one-launch KV write", facts.device, check)
                why = self._checked[checked]
            known = writes[id(pool)] = weakref.ref(pool), why
        return known[1]

    def joint_refusal(self, facts: Facts) -> str | None:
        """Why the KV write and the cast stay two launches, or None; asked once."""
        if not casts.most_joint_writes(facts.device):
            return "no kernel for it here"
        key = ("joint", facts.device, facts.fp8, facts.q_dtype, facts.width)
        if key not in self._checked:
            if is_capturing(facts.device):
                return "not checked before capture"
            check = functools.partial(selfcheck.check_joint, facts)
            self._checked[key] = self._check("KV write and cast in one launch", facts.device, check)
        return self._checked[key]

    def _check(self, name: str, device: torch.device, check: Callable[[], str | None]) -> str | None:
        """What `check` finds wrong, or None. Said once; together where several fail in the same way."""
        cause = None
        try:
            wrong = check()
        except Exception as e:
            wrong = one_line(e)
            cause = type(e).__name__
        if wrong is None:
            return None
        if self._failed is None:
            self._say_failed([name], device, wrong)
            return wrong
        # A compiler's complaint names the kernel: of one kind of exception the first speaks for all.
        same = next((why for why in self._failed if cause and why.split(":")[0] == cause), wrong)
        names = self._failed.setdefault(same, [])
        if name not in names:
            names.append(name)
        return wrong

    @contextlib.contextmanager
    def together(self, device: torch.device) -> Iterator[None]:
        """What fails its check inside, on `device`, is said afterwards, in one line a cause."""
        self._failed = {}
        try:
            yield
        finally:
            failed, self._failed = self._failed, None
            for why, names in failed.items():
                self._say_failed(names, device, why)

    def _say_failed(self, names: Sequence[str], device: torch.device, why: str) -> None:
        self._warn(f"self-check of {', '.join(names)} failed on {device}: {why}; not used")
