"""What did a scheduler of prove_serve.py do that tells that a mode of SGLang was really on?

Counts forward passes and attention calls by mode, and who ran beside whom, in every process of the server;
every half second they are written to KVLAB_TEST_WITNESS.PID. SGLang's methods do what they do. While
KVLAB_TEST_WITNESS.hold exists no prefill begins: requests that arrive together are then batched the same way
in every server.
"""

import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_counts: Counter[str] = Counter()
_streams: dict[str, set[int]] = {}
# By phase, prefill or decode: the stream of its last pass and an event behind it.
_last: dict[str, tuple[int, Any]] = {}


def install() -> None:
    for module, wrap in {
        "sglang.srt.model_executor.model_runner": _model_runner,
        "sglang.srt.layers.attention.base_attn_backend": _attention,
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner": _prefill_runner,
        "sglang.srt.mem_cache.hiradix_cache": _host_cache,
        "sglang.srt.managers.scheduler_components.weight_updater": _weights,
        "sglang.srt.managers.scheduler": _scheduler,
    }.items():
        after_import(module, wrap)
    threading.Thread(target=_write, daemon=True).start()


def after_import(name: str, does: Any) -> None:
    """`does(module)` once SGLang's module is there."""
    from kvlab.patch.hooks import AfterImport

    if name in sys.modules:
        does(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport({name: does}))


def _place(end: str) -> Path:
    return Path(f"{os.environ['KVLAB_TEST_WITNESS']}.{end}")


def _write() -> None:
    path, last = _place(str(os.getpid())), None
    while True:
        # Copies: the scheduler's thread goes on counting.
        streams = {phase: len(its) for phase, its in _streams.copy().items()}
        now = json.dumps({"counts": _counts.copy(), "streams": streams})
        if _counts and now != last:
            part = path.with_suffix(".part")
            part.write_text(now, encoding="utf-8")
            part.rename(path)
            last = now
        time.sleep(0.5)


def _around(cls: Any, name: str, does: Any) -> None:
    """`does(original, self, *args, **kwargs)` in the place of a method."""
    original = vars(cls)[name]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return does(original, self, *args, **kwargs)

    setattr(cls, name, method)


def _model_runner(module: Any) -> None:
    import torch

    def forward(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode.name
        phase = "decode" if batch.forward_mode.is_decode() else "prefill"
        stream = torch.cuda.current_stream()
        for other, (its, event) in list(_last.items()):
            if other != phase and its != stream.cuda_stream and not event.query():
                _counts[f"{phase} queued while a {other} ran"] += 1
        out = original(self, batch, *args, **kwargs)
        _counts[f"{mode} forward"] += 1
        if out.can_run_graph:
            _counts[f"{mode} forward by graph"] += 1
        _streams.setdefault(phase, set()).add(stream.cuda_stream)
        both = [_streams.get(p, set()) for p in ("prefill", "decode")]
        if all(both) and not both[0] & both[1]:
            _counts["prefill and decode: streams apart"] += 1
        event = torch.cuda.Event()
        event.record(stream)
        _last[phase] = stream.cuda_stream, event
        return out

    _around(module.ModelRunner, "forward", forward)


def _attention(module: Any) -> None:
    import torch

    def forward(
        original: Any, self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.compiler.is_compiling():
            how = "captured" if torch.cuda.is_current_stream_capturing() else "eager"
            _counts[f"{batch.forward_mode.name} attention {how}"] += 1
        return original(self, q, k, v, layer, batch, *args, **kwargs)

    _around(module.AttentionBackend, "forward", forward)


def _prefill_runner(module: Any) -> None:
    def capture(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _counts["prefill shapes captured"] += 1
        return original(self, *args, **kwargs)

    _around(module.PrefillCudaGraphRunner, "capture_one_shape", capture)


def _host_cache(module: Any) -> None:
    def load_back(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        slots = original(self, *args, **kwargs)
        _counts["rows loaded back"] += 0 if slots is None else len(slots)
        return slots

    _around(module.HiRadixCache, "load_back", load_back)


def _weights(module: Any) -> None:
    import torch

    def update(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _counts["weights updated"] += 1
        return original(self, *args, **kwargs)

    def free(name: str) -> Any:
        def does(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            before = torch.cuda.mem_get_info()[0]
            out = original(self, *args, **kwargs)
            after = torch.cuda.mem_get_info()[0]
            _counts[name] += abs(after - before)
            return out

        return does

    manager = module.SchedulerWeightUpdaterManager
    _around(manager, "update_weights_from_disk", update)
    _around(manager, "release_memory_occupation", free("bytes released"))
    _around(manager, "resume_memory_occupation", free("bytes taken again"))


def _scheduler(module: Any) -> None:
    hold = _place("hold")

    def prefill(original: Any, self: Any) -> Any:
        return None if hold.exists() else original(self)

    _around(module.Scheduler, "get_new_batch_prefill", prefill)
