"""Does a Triton kernel fit a chip that is not here? Ahead-of-time compilation and what ptxas says of it.

`report(specs, capabilities)` compiles in processes of its own, without TRITON_INTERPRET, so it also answers
where this process interprets its kernels.
"""

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

# Compute capability -> shared memory a block may have at most, bytes, and 32-bit registers an SM has.
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_PER_BLOCK = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD = 255
CAPABILITIES = tuple(SHARED_PER_BLOCK)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One specialisation of a kernel.

    `kernel` is `module:function`. `signature` maps each argument to its Triton type (`*fp8e4nv`, `*bf16`,
    `i32`, `fp32` …) and leaves out what `constexprs` binds. `divisible` names the arguments that the launcher
    would find divisible by 16: aligned pointers, strides. A constexpr that is a Triton dtype is written
    `tl.bfloat16`.
    """

    name: str
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, bool | int | float | str | None] = {}
    divisible: list[str] = []
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What one specialisation takes on one chip; `error`: the compiler's last line, if it fails."""

    name: str
    capability: int
    threads: int
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0
    error: str = ""

    def exceeds(self) -> list[str]:
        """Which of the chip's limits it breaks, in words; empty when it fits."""
        found = [f"does not compile: {self.error}"] if self.error else []
        if self.shared > SHARED_PER_BLOCK[self.capability]:
            found.append(f"shared memory {self.shared} B of {SHARED_PER_BLOCK[self.capability]} B a block")
        if self.registers > REGISTERS_PER_THREAD:
            found.append(f"{self.registers} of {REGISTERS_PER_THREAD} registers a thread")
        if self.registers * self.threads > REGISTERS_PER_SM:
            found.append(f"{self.registers} registers x {self.threads} threads of {REGISTERS_PER_SM} an SM")
        if self.spill_stores or self.spill_loads:
            found.append(f"spills {self.spill_stores} B out and {self.spill_loads} B in")
        return found


def report(specs: Sequence[Spec], capabilities: Sequence[int] = CAPABILITIES) -> list[Resources]:
    """Compile each spec for each compute capability, in that order, in processes without the interpreter."""
    return report_each([(spec, capability) for spec in specs for capability in capabilities])


def report_each(work: Sequence[tuple[Spec, int]]) -> list[Resources]:
    """Compile each (spec, compute capability), in that order, in processes without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

    def compiled(share: Sequence[tuple[Spec, int]]) -> list[Resources]:
        given = msgspec.json.encode(share)
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name], input=given, capture_output=True, env=env
        )
        if done.returncode:
            raise RuntimeError(done.stderr.decode().strip() or f"exit code {done.returncode}")
        return msgspec.json.decode(done.stdout, type=list[Resources])

    # A process has imported torch and triton when another would have compiled a few.
    workers = max(1, min(-(-len(work) // 8), os.cpu_count() or 1, 8))
    with ThreadPoolExecutor(workers) as pool:
        shares = [iter(s) for s in pool.map(compiled, [work[i::workers] for i in range(workers)])]
    return [next(shares[i % workers]) for i in range(len(work))]


def compile_one(spec: Spec, capability: int) -> Resources:
    """Compile in this process, which must not have TRITON_INTERPRET set; nothing is cached."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = spec.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    constants = {
        k: getattr(tl, v.removeprefix("tl.")) if isinstance(v, str) and v.startswith("tl.") else v
        for k, v in spec.constexprs.items()
    }
    signature = {a: spec.signature.get(a, "constexpr") for a in kernel.arg_names}
    attrs = {(kernel.arg_names.index(a),): [["tt.divisibility", 16]] for a in spec.divisible}
    found = Resources(name=spec.name, capability=capability, threads=32 * spec.num_warps)
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(
                ASTSource(kernel, signature, constants, attrs),
                target=GPUTarget("cuda", capability, 32),
                options={
                    "num_warps": spec.num_warps,
                    "num_stages": spec.num_stages,
                    "maxnreg": spec.maxnreg,
                },
            )
    except Exception as e:  # Whatever the compiler raises is the answer.
        lines = f"{type(e).__name__}: {e}".strip().splitlines()
        return msgspec.structs.replace(found, error=lines[-1])
    text = log.getvalue()

    def number(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, text)), default=0)

    return msgspec.structs.replace(
        found,
        threads=32 * compiled.metadata.num_warps,
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared=compiled.metadata.shared,
    )


if __name__ == "__main__":
    _work = msgspec.json.decode(sys.stdin.buffer.read(), type=list[tuple[Spec, int]])
    sys.stdout.buffer.write(msgspec.json.encode([compile_one(*each) for each in _work]))
