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
        self._kept: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

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
        compiled, tail = kept
        compiled[grid, 1, 1](*addresses, *numbers, *tail, stream=current_stream(tensors[0].device.index))

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
            self._kept[key] = compiled, tuple(constants[n] for n in names)


@cache
def is_known() -> bool:
    """Does this Triton launch a compiled kernel with all parameters of the function, constants too, in order?

    Asked of its code, not of its version; `compiled[grid]` is how its own tutorial launches again.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    try:
        launches = inspect.getsource(JITFunction.run)
        again = inspect.getsource(CompiledKernel.__getitem__)
    except (AttributeError, OSError, TypeError):
        return False
    return "launch_exit_hook, *bound_args.values())" in launches and "launch_exit_hook, *args)" in again


def current_stream(device: int) -> int:
    """The handle of the device's current stream."""
    try:
        return torch._C._cuda_getCurrentRawStream(device)
    except AttributeError:
        return torch.cuda.current_stream(device).cuda_stream
