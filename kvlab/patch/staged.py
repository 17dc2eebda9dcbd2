"""Which captured passes are replayed without a word to their backend? They are counted at their runner.

Where the backend can (SGLang 0.5.23 on fa3), the extend graphs of a multi-layer draft model make their own
metadata: no metadata hook runs before such a replay.
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from kvlab.patch.replacements import Replacements
from kvlab.patch.runtime import Runtime
from kvlab.patch.saying import one_line

MODULE = "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner"
# One step's graph, and the runner that has the graph of all steps.
_STEP, _ALL = (
    "MultiLayerEagleDraftExtendCudaGraphRunner",
    "OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner",
)


def patch_runners(runtime: Runtime, done: Replacements, module: ModuleType) -> None:
    """Count what the runners of `module` replay. Those of another shape tell their backends of it."""
    for name, replays in ((_STEP, _of_a_step), (_ALL, _of_all_steps)):
        cls = getattr(module, name, None)
        replay = vars(cls).get("replay") if isinstance(cls, type) else None
        if callable(replay):
            done.set(cls, "replay", _counted(runtime, replay, replays))


def _counted(
    runtime: Runtime, replay: Callable[..., Any], replays: Callable[..., Iterator[tuple[Any, int, Any]]]
) -> Callable[..., Any]:
    @functools.wraps(replay)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = replay(self, *args, **kwargs)
        if runtime.is_active:
            try:
                for runner, batch, tokens in replays(self, *args, **kwargs):
                    state = runtime.states.get(runner.attn_backend)
                    if state is not None and runner.metadata_captured_in_graph:
                        runtime.replayed(
                            state.family, runner.attn_backend, runner.forward_mode, batch, tokens
                        )
            except Exception as e:
                # A figure is missing, nothing else.
                runtime.say(f"replays of draft-extend graphs are not counted: {one_line(e)}")
        return result

    return counted


def _of_a_step(runner: Any, bs: int, seq_lens_sum: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    # Others, and those of releases without such graphs, have their metadata made before, with a hook behind.
    if getattr(runner, "metadata_captured_in_graph", False):
        yield runner, bs, seq_lens_sum


def _of_all_steps(all_of_them: Any, step: int) -> Iterator[Any]:
    if step == 0:
        for runner in filter(None, all_of_them.runners):
            yield from _of_a_step(runner, all_of_them.bs, all_of_them.seq_lens_sum)
