"""A patch that was applied here reaches the SGLang processes that are spawned from here.

A spawned process starts anew and knows nothing of its parent's patches. From 0.5.11 SGLang loads plugins in
each of them; earlier releases do not, and a plugin may be excluded by SGLANG_PLUGINS. So the target that a
spawned process is told to run is wrapped in one that applies the patch first.
"""

import functools
import multiprocessing.context
from collections.abc import Callable
from typing import Any

from kvlab.patch.replacements import Replacements


class Patched:
    """Pickles as the target and the strategy; in the child, applies and runs."""

    def __init__(self, target: Callable[..., Any], asked: str) -> None:
        self.target, self.asked = target, asked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from kvlab.patch import apply

        apply(self.asked)
        return self.target(*args, **kwargs)


def install(asked: str, done: Replacements) -> None:
    """Wrap SGLang's own targets of processes started by spawn; others are left as they are."""
    spawned = multiprocessing.context.SpawnProcess
    original = vars(spawned)["_Popen"]
    start = original.__func__ if isinstance(original, staticmethod) else original

    @functools.wraps(start)
    def popen(process: Any) -> Any:
        target = getattr(process, "_target", None)
        is_sglang = str(getattr(target, "__module__", "")).split(".")[0] == "sglang"
        if is_sglang:
            process._target = Patched(target, asked)
        return start(process)

    done.set(spawned, "_Popen", staticmethod(popen))
