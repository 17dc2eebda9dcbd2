"""Which of Inductor's kernels run in this process, and with which blocks? They are picked by timing.

SGLang sums the experts of up to 32 tokens by a torch.compile function. Inductor times its candidates where a
process first calls it, keeps the winner beside the kernel's source under TORCHINDUCTOR_CACHE_DIR, and another
process that has the same folder takes that one. Another block adds in another order: bits compare only where
the picks are the same.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def picks() -> dict[str, str]:
    """{kernel and its sizes: the configuration that it runs with} of this process."""
    found: dict[str, str] = {}
    for tuner in _tuners():
        launchers = getattr(tuner, "launchers", [])
        if len(launchers) != 1 or getattr(launchers[0], "config", None) is None:
            continue
        name = (getattr(tuner, "inductor_meta", None) or {}).get("kernel_name") or tuner.fn.__name__
        sizes = ", ".join(f"{k} {v}" for k, v in sorted((getattr(tuner, "size_hints", None) or {}).items()))
        found[f"{name} ({sizes})"] = _config(launchers[0].config)
    return dict(sorted(found.items()))


@contextmanager
def forced(block: int) -> Iterator[None]:
    """Where a candidate has XBLOCK `block`, it wins, whatever the time; nothing is kept for others."""
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    timed = CachingAutotuner.benchmark_all_configs

    def chosen(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
        wanted = [c for c in self.launchers if c.config.kwargs.get("XBLOCK") == block]
        if not wanted:
            return timed(self, *args, **kwargs)
        return {launcher: float(launcher not in wanted) for launcher in self.launchers}

    CachingAutotuner.benchmark_all_configs = chosen
    try:
        with config.patch(autotune_local_cache=False, fx_graph_cache=False):
            yield
    finally:
        CachingAutotuner.benchmark_all_configs = timed


def _tuners() -> list[Any]:
    module = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if module is None:
        return []
    # By type: others' objects may answer isinstance with work of their own.
    return [o for o in gc.get_objects() if issubclass(type(o), module.CachingAutotuner)]


def _config(config: Any) -> str:
    known = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return ", ".join(f"{k} {v}" for k, v in sorted(known.items()))
