"""What does a launch of a compiled Triton kernel cost the host, and what of that need not be?

`kernel[grid](...)` inspects every argument of every launch to find out which compiled variant it is for: in
eager serving that costs more than the launch. Our kernels are launched for every layer with arguments of a
few kinds. `Direct` keeps the compiled kernel by what tells those kinds apart, and launches it with addresses.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

try:
    from triton import knobs
except ImportError:  # Triton before 3.4
    knobs = None

# Triton takes an address for more than this, and a number past 32 bits for another type.
_ALIGNED = 16
_INT32 = 2**31


class Direct:
    """The launches of one Triton kernel: parameters are tensors, then integers, then constants.

    The first launch of a key is Triton's own and compiles. So is every one that Triton might compile anew
    for: a tensor off 16 bytes, a number of 2^31 and more; and all of them in its interpreter, or where its
    release hands its compiled kernels something else than 3.4 to 3.7 do (`is_known`).
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._kept: dict[Any, tuple[Any, ...]] = {}

    def __call__(
        self,
        key: tuple[Any, ...],
        grid: int,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[int, ...],
        constants: Callable[[], dict[str, Any]],
    ) -> None:
        """Launch `grid` programs on the current stream of the device that the tensors are on.

        `key`: everything that `constants()` and the tensors' dtypes depend on, the device, and each of the
        `numbers` that the kernel is specialised on. `constants`: by name, launch options among them.
        """
        addresses = [t.data_ptr() for t in tensors]
        low = 0
        for address in addresses:
            low |= address
        kept = self._kept.get(key)
        if kept is None or low % _ALIGNED or max(numbers) >= _INT32:
            self._by_triton(key, grid, tensors, numbers, constants())
            return
        compiled, run, function, packed, tail = kept
        stream = current_stream(tensors[0].device.index)
        if has_hooks():
            compiled[grid, 1, 1](*addresses, *numbers, *tail, stream=stream)
        else:
            run(grid, 1, 1, stream, function, packed, None, None, None, *addresses, *numbers, *tail)

    def prepared(self, key: tuple[Any, ...], grid: int, numbers: tuple[int, ...]) -> tuple[Any, ...] | None:
        """`(run, function, packed, grid, rest)` of a launch of this key that was kept, for a caller that
        launches it itself: `run(grid, 1, 1, stream, function, packed, None, None, None, *addresses, *rest)`.
        """
        kept = self._kept.get(key)
        if kept is None or max(numbers) >= _INT32:
            return None
        _, run, function, packed, tail = kept
        return run, function, packed, grid, (*numbers, *tail)

    def _by_triton(
        self,
        key: tuple[Any, ...],
        grid: int,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[int, ...],
        constants: dict[str, Any],
    ) -> None:
        compiled = self.kernel[(grid,)](*tensors, *numbers, **constants)
        is_usual = all(t.data_ptr() % _ALIGNED == 0 for t in tensors) and max(numbers) < _INT32
        if is_usual and compiled is not None and is_known():
            names = self.kernel.arg_names[len(tensors) + len(numbers) :]
            tail = tuple(constants[n] for n in names)
            self._kept[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, tail


@cache
def is_known() -> bool:
    """Does this Triton launch a compiled kernel with all parameters of the function, constants too, in order?

    Asked of its code, not of its version; `compiled[grid]` is how its own tutorial launches again.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    if knobs is None or torch.version.hip:  # on ROCm a tensor's size decides on the variant too
        return False
    try:
        launches = inspect.getsource(JITFunction.run)
        again = inspect.getsource(CompiledKernel.__getitem__)
    except (AttributeError, OSError, TypeError):
        return False
    runs = "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, launch_metadata"
    hooks = "launch_enter_hook, knobs.runtime.launch_exit_hook, *"
    return f"{hooks}bound_args.values())" in launches and runs in again and f"{hooks}args)" in again


def has_hooks() -> bool:
    """Does somebody, a profiler of Triton's, watch launches? `compiled[grid]` tells them."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # None, or from 3.5 on a chain of them.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: int) -> int:
    """The handle of the device's current stream."""
    try:
        return torch._C._cuda_getCurrentRawStream(device)
    except AttributeError:
        return torch.cuda.current_stream(device).cuda_stream
