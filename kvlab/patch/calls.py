"""One call through the seam: decide, take the strategy's path, and stock's whenever anything is amiss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvlab.kernels.checks import FP8_DTYPES
from kvlab.patch.attempt import Attempt
from kvlab.patch.saying import one_line
from kvlab.patch.scratch import is_capturing
from kvlab.patch.seam import PoolView, put_back
from kvlab.patch.sites import Site
from kvlab.patch.strategies import Restart, TakeOver

if TYPE_CHECKING:
    from kvlab.patch.runtime import Runtime


def through(runtime: Runtime, site: Site, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a site's method, with the pool cast the cheap way where that is certain to be right."""
    states, family = runtime.states, site.family
    is_backend_s, serves_others = site.holder == "self", family == "fa3"

    @functools.wraps(original)
    def forward(
        self: Any, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not runtime.is_active or torch.compiler.is_compiling():
            return original(self, q, k, v, layer, forward_batch, *args, **kwargs)
        holder = self if is_backend_s else forward_batch
        pool = getattr(holder, "token_to_kv_pool", None)
        if type(pool) is PoolView or getattr(pool, "dtype", None) not in FP8_DTYPES:
            return original(self, q, k, v, layer, forward_batch, *args, **kwargs)
        if serves_others and not getattr(self, "use_mla", True):
            # FP8 keys and values of a model without MLA: nothing is cast there.
            return original(self, q, k, v, layer, forward_batch, *args, **kwargs)

        state = states.get(self) or runtime.state(family, self)
        captures = is_capturing(q.device)
        if captures:
            runtime.has_captured = True
        q_rope = kwargs.get("q_rope")
        if q_rope is None and len(args) > 1:
            # save_kv_cache, q_rope, k_rope may come by position.
            q_rope = args[1]
        graph = state.graph if captures else None
        attempt = Attempt(runtime, state, site, self, layer, forward_batch, q, q_rope, graph, captures)
        try:
            try:
                try:
                    holder.token_to_kv_pool = PoolView(pool, attempt)
                    attempt.enter(pool)
                    result = original(self, q, k, v, layer, forward_batch, *args, **kwargs)
                finally:
                    put_back(holder, pool)
                if not attempt.undo or attempt.served is not None:
                    return result
                amiss = "SGLang's method asked for no cast"
            except TakeOver as taken:
                amiss = ""
                attempt.leave()
                try:
                    return taken.compute()
                except Exception as e:
                    runtime.broke(attempt.strategy_name, e)
                    attempt.fell_back(f"{attempt.strategy_name} failed")
            except Restart:
                amiss = ""
            except Exception as e:
                if attempt.standing is None and attempt.served is None:
                    # Nothing has begun: a property of a fork's or a subclass's, say.
                    why, amiss = "the pool cannot be seen through a view", ""
                    attempt.fell_back(why)
                    runtime.say(f"calls of {site.name} are left to stock: {why}: {one_line(e)}")
                elif not attempt.undo or (captures and not attempt.strategy.leaves_plan):
                    raise
                else:
                    # The kernel was handed other tables or rows than stock's.
                    amiss = one_line(e)
            attempt.leave()
            # SGLang's method again: it writes the same rows to the same slots, then casts as stock does.
            # Behind the handlers, whose tracebacks hold what the strategy had allocated.
            result = original(self, q, k, v, layer, forward_batch, *args, **kwargs)
            if amiss:
                # Not stock's own fault: that would have been raised again.
                attempt.fell_back(f"{attempt.strategy_name} failed")
                runtime.broke(attempt.strategy_name, amiss)
            return result
        finally:
            attempt.end()

    return forward
