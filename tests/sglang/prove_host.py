"""What does the patch execute on the host, beyond stock? Counted and timed on a CPU, by hand.

    .venv-sglang-0.5.15.post1/bin/python tests/sglang/prove_host.py [OUT.json] [--list] [--families …]

A real backend of the installed release on a real pool; every kernel's launch, and attention itself, does
nothing. What a GPU has and a CPU lacks is put in by its Python part: the question whether a stream is being
captured, events, streams' handles. `layer`: one eager call of `forward_decode` or `forward_extend`; `replay`:
the metadata hook of a replayed decode step. Of each: Python calls, C calls and bytecodes (exact), the host's
microseconds (the least of many), and their ratio by short turns. SGLang's own Triton kernels go through
Triton's binder, as on a GPU. Ours go the way that they take from a kind's second launch on.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
from rig import world as rig
from rig.world import ForwardMode, Shape, World
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvlab import patch
from kvlab.kernels import cast, direct, kv_write, slot_list, write_cast
from kvlab.patch import calls, casts, plan_hooks, scratch, selfcheck

LENGTHS = [12]
ROUNDS = 60
CLASSES = (rig.flashinfer_mla.FlashInferMLAAttnBackend, rig.fa3.FlashAttentionBackend)
LAYERS = 12
# Any argument, and nothing done: a C function, as those that it stands for.
NOTHING = [].count
NOTHING_OF_NOBODY = int


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--families", nargs="+", default=["flashinfer_mla", "fa3"])
    parser.add_argument(
        "--strategies", nargs="+", default=["shadow"], help="`exact` leaves so small a pool to stock"
    )
    parser.add_argument("--list", action="store_true", help="which functions, and how often")
    asked = parser.parse_args()
    without_launches()
    found = []
    for family in asked.families:
        for what in ("replay", "decode", "extend"):
            for strategy in asked.strategies:
                told, functions = compared(family, what, strategy)
                found.append({"family": family, "what": what, "strategy": strategy, **told})
                print(json.dumps(found[-1]), flush=True)
                for name, n in functions.most_common() if asked.list else ():
                    print(f"    {n:6.2f}  {name}")
    if asked.out:
        asked.out.write_text(json.dumps({"sglang": rig.RELEASE, "found": found}) + "\n", encoding="utf-8")
    return 0


def compared(family: str, what: str, strategy: str) -> tuple[dict, Counter]:
    """Of a layer's call or a replay's hook, stock's and patched: counts; microseconds by short turns."""
    make = replays if what == "replay" else eager
    sides = {}
    for name in ("off", strategy):
        patch.apply(name)
        step, count = make(family, what)
        for _ in range(3):
            step()
        sides[name] = step, methods()
    told: dict = {}
    for name, (step, its) in sides.items():
        put_in(its)
        calls, c_calls, functions = profiled(step)
        counts = {"calls": calls, "c_calls": c_calls, "bytecodes": bytecodes(step)}
        told["stock" if name == "off" else "patched"] = {k: round(n / count, 2) for k, n in counts.items()}
    times: dict = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, (step, its) in sides.items():
            put_in(its)
            step()
            times[name].append(min(timed(step) for _ in range(10)) * 1e6 / count)
    fallbacks = patch.status()["counters"]["fallbacks"]
    assert not fallbacks, fallbacks
    patch.remove()
    for side, name in (("stock", "off"), ("patched", strategy)):
        told[side]["us"] = round(min(times[name]), 2)
    pairs = zip(times[strategy], times["off"], strict=True)
    told["ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return told, Counter({k: n / count for k, n in functions.items()})


def methods() -> dict:
    """The backends' methods as they are now."""
    return {cls: dict(vars(cls)) for cls in CLASSES}


def put_in(its: dict) -> None:
    for cls, named in its.items():
        for name, value in named.items():
            if callable(value) and vars(cls)[name] is not value:
                setattr(cls, name, value)


def eager(family: str, kind: str):
    """All layers of one step, its metadata made before; how many."""
    its, batch, tensors = made(family, kind)
    forward = getattr(its.backend, f"forward_{kind}")
    q, q_rope, k, k_rope = tensors

    def step() -> None:
        for layer in its.layers:
            forward(q, k, k, layer, batch, save_kv_cache=True, q_rope=q_rope, k_rope=k_rope)

    return step, LAYERS


def replays(family: str, what: str):
    """The metadata hook of a replay, behind a capture whose layers were counted."""
    its, batch, tensors = made(family, "decode")
    its.graphs()
    on_a_gpu(its)
    its.capture(batch)
    wrapper = its.backend.forward_metadata
    q, q_rope, k, k_rope = tensors
    STATE["capturing"] = True
    for layer in its.layers:
        its.backend.forward_decode(q, k, k, layer, batch, save_kv_cache=True, q_rope=q_rope, k_rope=k_rope)
    STATE["capturing"] = False
    on_a_gpu(its)
    backend, bs = its.backend, batch.batch_size

    def old() -> None:
        backend.init_forward_metadata_replay_cuda_graph(
            *(bs, batch.req_pool_indices, batch.seq_lens, batch.seq_lens_sum, None),
            *(batch.forward_mode, batch.spec_info, batch.seq_lens_cpu),
        )

    def new() -> None:
        backend.init_forward_metadata_out_graph(batch)

    assert wrapper is not None
    return (old if rig.OLD_HOOKS else new), 1


def on_a_gpu(its: World) -> None:
    """flashinfer's wrappers of captured graphs say that they are on one."""
    for wrapper in getattr(its.backend, "decode_cuda_graph_metadata", {}).values():
        if hasattr(wrapper, "plans"):
            wrapper.device = SimpleNamespace(type="cuda", index=0)


def made(family: str, kind: str):
    its = World(family, slots=16, max_bs=4, shape=Shape(layers=LAYERS, heads=2, rank=32, rope=16)).fill()
    for request, n in enumerate(LENGTHS):
        its.allot(request, n)
    mode = ForwardMode.DECODE if kind == "decode" else ForwardMode.EXTEND
    batch = its.batch(mode, LENGTHS, prefix=None if kind == "decode" else [n // 2 for n in LENGTHS])
    its.plan(batch)
    return its, batch, its.tensors(batch)


def profiled(step) -> tuple[int, int, Counter]:
    """Python calls, C calls and the former by function."""
    functions: Counter = Counter()
    c_calls = 0

    def note(frame, event, arg) -> None:
        nonlocal c_calls
        if event == "call":
            code = frame.f_code
            functions[f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_qualname}"] += 1
        elif event == "c_call":
            c_calls += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    del functions[next(k for k in functions if "prove_host" in k and k.endswith((".step", ".old", ".new")))]
    return sum(functions.values()), c_calls, functions


def bytecodes(step) -> int:
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
    return count


def timed(step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


STATE = {"capturing": False}


def nothing(*args, **kwargs) -> None:
    return None


def bound(interpreted):
    """SGLang's kernel as on a GPU: Triton looks at every argument, finds the compiled one, launches it."""
    kernel = JITFunction(interpreted.fn)
    compiled = SimpleNamespace(run=Run(), function=0, packed_metadata=0)
    compiled.launch_metadata = lambda grid, stream, *args: None

    def compile_it(key, *rest):
        kernel.device_caches[0][0][key] = compiled
        return compiled

    kernel._do_compile = compile_it
    return kernel


def without_launches() -> None:
    """Everything but launches, attention and what only a GPU answers."""
    casts.INTERPRET = True
    direct.is_known = lambda: True
    torch._C._cuda_getCurrentRawStream = NOTHING
    for name in ("check", "check_write", "check_joint"):
        setattr(selfcheck, name, lambda *facts: None)
    for module, name in ((kv_write, "_launch"), (cast, "_cast"), (write_cast, "_launch")):
        setattr(module, name, direct.Direct(pretended(getattr(module, name).kernel)))
    write_cast._without = direct.Direct(pretended(write_cast._without.kernel))
    for name in ("list_for", "slot_list"):
        made = SimpleNamespace(slots=torch.zeros(16, dtype=torch.int32), num_slots=16)
        made.count = torch.zeros(1, dtype=torch.int32)
        setattr(slot_list, name, lambda *args, made=made: made)

    torch._C._cuda_getCurrentStream = NOTHING

    def is_capturing(device) -> bool:
        return bool(device.type != "meta" and NOTHING(0)) or STATE["capturing"]

    for module in (calls, scratch, plan_hooks):
        module.is_capturing = is_capturing
    torch.cuda.Event, torch.cuda.current_stream = Event, current_stream
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=NOTHING_OF_NOBODY,
            get_current_stream=NOTHING,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    rig.standins.BatchMLAPagedAttentionWrapper.run = lambda self, q, *args, out=None, **kwargs: out
    for module in (rig.fa3, rig.standins):
        module.flash_attn_with_kvcache = lambda q, *args, qv=None, **kwargs: qv
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang"):
            for name, value in list(vars(module).items()):
                if type(value).__name__ == "InterpretedFunction":
                    setattr(module, name, bound(value))


def pretended(kernel):
    """A kernel of ours whose first launch compiles nothing and whose others are a C function."""
    compiled = SimpleNamespace(run=Run(), function=0, packed_metadata=0)

    class Kernel:
        arg_names = kernel.arg_names

        def __getitem__(self, grid):
            return lambda *args, **constants: compiled

    return Kernel()


class Run:
    """Triton's launcher is a class with `__call__` before its C function."""

    def __call__(self, grid_x, grid_y, grid_z, stream, function, *args) -> None:
        NOTHING(args)


class Stream:
    def __init__(self, stream_id, device_index, device_type) -> None:
        self.stream_id = stream_id


def current_stream(device=None) -> Stream:
    """torch's: it looks up the device's index, asks, and makes an object of the answer."""
    nothing()
    NOTHING(nothing(device, optional=True))
    return Stream(stream_id=0, device_index=0, device_type=1)


class Event:
    def query(self) -> bool:
        return not NOTHING(0)

    def record(self, stream=None) -> None:
        if stream is None:
            stream = torch.cuda.current_stream()
        NOTHING(stream)

    def synchronize(self) -> None:
        NOTHING(0)


if __name__ == "__main__":
    sys.exit(main())
