"""A plugin of the test's own: what KVLAB_TEST_FAULT names goes wrong in every process of the server.

SGLang loads it beside kvlab, through the same entry-point group. Faults are put on kvlab's modules, so their
order of loading does not matter.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def install() -> None:
    for name in filter(None, os.environ.get("KVLAB_TEST_FAULT", "").split(",")):
        FAULTS[name]()


def seeded_dummy_weights() -> None:
    """`--load-format dummy` with weights under which tokens depend on the cache."""
    from kvlab import dummy
    from kvlab.patch.hooks import AfterImport

    module = "sglang.srt.model_loader.loader"

    def seed(loader: Any) -> None:
        # For the life of the process: nobody leaves this block.
        dummy.seeded_dummy_weights().__enter__()
        seeded = loader.initialize_dummy_weights

        def and_derived(model: Any, *args: Any, **kwargs: Any) -> None:
            seeded(model, *args, **kwargs)
            # Sarvam's layers keep w_kc and w_vc as DeepSeek's do, but only its `load_weights` derives them.
            derive = getattr(model, "_set_mla_wkc_wvc", None)
            if callable(derive):
                derive()

        loader.initialize_dummy_weights = and_derived

    if module in sys.modules:
        seed(sys.modules[module])
    else:
        sys.meta_path.insert(0, AfterImport({module: seed}))


def witness() -> None:
    """No fault: SGLang's own doings are counted."""
    import serve_witness

    serve_witness.install()


def multiplexing_starts() -> None:
    """No fault but a mend of SGLang's: in 0.5.15.post1 its multiplexing asks the scheduler for names that the
    scheduler keeps elsewhere, and no server with it comes up ('Scheduler' object has no attribute 'gpu_id').
    """
    from serve_witness import after_import

    def give(module: Any) -> None:
        for name in ("gpu_id", "tp_size"):
            setattr(module.Scheduler, name, property(lambda self, name=name: getattr(self.ps, name)))

    after_import("sglang.srt.managers.scheduler", give)


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


def _raising(when: Any, text: str) -> None:
    """The shadow cast, and that with the KV write, raise `text` where `when(rows)`; a self-check has 256."""
    from kvlab.patch import casts

    right, with_write = casts.shadow, casts.write_shadow

    def shadow(rows: Any, out: Any, *rest: Any) -> Any:
        if when(rows):
            raise RuntimeError(text)
        return right(rows, out, *rest)

    def write_shadow(found: Any, out: Any, new: Any, *rest: Any, **named: Any) -> Any:
        if when(new.buffer):
            raise RuntimeError(text)
        return with_write(found, out, new, *rest, **named)

    casts.shadow, casts.write_shadow = shadow, write_shadow


def self_check_raises() -> None:
    _raising(lambda rows: True, "injected: kernel raises in the self-check")


def self_check_is_wrong() -> None:
    """One bit of the cast is off, in the self-check as it would be in serving."""
    from kvlab.patch import casts

    right = casts.shadow

    def shadow(rows: Any, out: Any, *rest: Any) -> Any:
        right(rows, out, *rest)
        out.view(_int16())[2, 0, 7] ^= 1
        return out

    casts.shadow = shadow


def _int16() -> Any:
    import torch

    return torch.int16


def joint_is_wrong() -> None:
    """One bit of what the KV write with the cast gives is off."""
    from kvlab.patch import casts

    right = casts.write_shadow

    def write_shadow(found: Any, out: Any, new: Any, *rest: Any, **named: Any) -> Any:
        right(found, out, new, *rest, **named)
        out.view(_int16())[2, 0, 7] ^= 1
        return out

    casts.write_shadow = write_shadow


def capture_raises() -> None:
    _raising(lambda rows: rows.shape[0] > 256 and _is_capturing(), "injected: kernel raises in capture")


def serving_raises() -> None:
    """Eager calls of a server that serves: graphs are captured, requests with a cached prefix come."""
    _raising(
        lambda rows: rows.shape[0] > 256 and not _is_capturing() and _trigger().exists(),
        "injected: kernel raises while serving",
    )


def repeated_launch_raises() -> None:
    """Graphs off: what launches a layer's kernels again, as the layer before did, raises while serving."""
    from kvlab.kernels import layers

    right = layers.WriteAndCast.again

    def again(self: Any, new: Any, *rest: Any) -> Any:
        if self._launches is not None and new.buffer.shape[0] > 4096 and _trigger().exists():
            raise RuntimeError("injected: a repeated launch raises while serving")
        return right(self, new, *rest)

    layers.WriteAndCast.again = again


def compile_fails() -> None:
    """Triton cannot compile any of kvlab's kernels; SGLang's own compile."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def only_others(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("kvlab."):
            raise RuntimeError("injected: ptxas fatal, no such architecture")
        return run(self, *args, **kwargs)

    JITFunction.run = only_others


def no_nvrtc() -> None:
    """The CUDA kernel's compiler is not installed."""
    from kvlab.kernels import nvrtc

    def missing() -> Any:
        raise nvrtc.CompileError("injected: no libnvrtc")

    nvrtc.library = missing


def no_scratch() -> None:
    """The allocator refuses the scratch, always."""
    import torch

    from kvlab.patch.scratch import Scratch

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("injected: CUDA out of memory")

    Scratch.reserve = full
    Scratch.rows = full


def half_applied() -> None:
    """The patch breaks after it has replaced the forward methods of the first backend."""
    from kvlab.patch import plan_hooks

    def breaks(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected: the patch breaks half way")

    plan_hooks.patch_plans = breaks


def removed_while_serving() -> None:
    """`patch.remove()` in the scheduler when the trigger file appears."""
    _when_triggered(lambda patch: patch.remove())


def another_while_serving() -> None:
    """Another strategy in the place of the first: captured graphs go on with what the first one holds."""
    _when_triggered(lambda patch: patch.apply("gather"))


def _when_triggered(does: Any) -> None:
    def wait() -> None:
        from kvlab import patch

        while not _trigger().exists():
            time.sleep(0.05)
        does(patch)

    threading.Thread(target=wait, daemon=True).start()


def _trigger() -> Path:
    return Path(os.environ["KVLAB_TEST_TRIGGER"])


FAULTS = {
    f.__name__: f
    for f in (
        seeded_dummy_weights,
        witness,
        multiplexing_starts,
        self_check_raises,
        self_check_is_wrong,
        joint_is_wrong,
        capture_raises,
        serving_raises,
        repeated_launch_raises,
        compile_fails,
        no_nvrtc,
        no_scratch,
        half_applied,
        removed_while_serving,
        another_while_serving,
    )
}
