"""The FP8 KV write in one launch (kvlab.kernels.kv_write): the bytes of stock's two or three.

Stock casts the latent and the rope part to FP8, each a launch, and scatters both with a third.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.patch import beneath, casts

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WIDE = (torch.bfloat16, torch.float16, torch.float32)


def refusal(pool: Any) -> str | None:
    """Why this pool's writes stay stock's, or None. A pool's class may have its own write: that one is left
    alone.
    """
    memory_pool = sys.modules.get("sglang.srt.mem_cache.memory_pool")
    plain = getattr(memory_pool, "MLATokenToKVPool", None)
    if plain is None:
        return "SGLang's MLATokenToKVPool is not loaded"
    # `get_key_buffer`: a copy that somebody makes there must hold rows that would wait for their cast.
    own = ("set_mla_kv_buffer", "_write_mla_kv_buffer", "_scatter_mla_rows", "get_key_buffer")
    for name in own:
        if getattr(type(pool), name, None) is not getattr(plain, name, None):
            return f"{type(pool).__name__} has its own {name}"
    its_module = vars(sys.modules[plain.__module__])
    for name in own:
        # Whoever put another one there wants each write to come to it.
        method = vars(pool).get(name, getattr(plain, name, None))
        if method is not None and getattr(method, "__globals__", None) is not its_module:
            return f"{name} is {beneath.told(method)}, not SGLang's own"
    if getattr(pool, "nsa_kv_cache_store_fp8", False) or getattr(pool, "dsa_kv_cache_store_fp8", False):
        return "rows with scales"
    if pool.dtype not in _FP8 or pool.store_dtype != torch.uint8:
        return f"rows of {pool.dtype} stored as {pool.store_dtype}"
    if getattr(pool, "requires_physical_write_loc", False):
        return "the pool checks its write locations"
    if os.environ.get("SGLANG_ENABLE_ASYNC_ASSERT", "0").lower() in ("1", "true", "yes", "y"):
        return "SGLANG_ENABLE_ASYNC_ASSERT checks write locations"
    return None


@dataclass(slots=True)
class NewRows:
    """Rows that a layer is about to write: token i of `nope` and `rope` to slot `loc[i]` of `buffer`.

    `nope` and `rope` [tokens, width] or [tokens, 1, width]; `buffer` uint8 [slots, 1, width]. `layout`:
    `laid_out` of them, the very object of the last layer's where it is the same; () where nobody asked.
    """

    buffer: torch.Tensor
    loc: torch.Tensor
    nope: torch.Tensor
    rope: torch.Tensor
    fp8: torch.dtype
    layout: tuple[Any, ...] = ()

    def write(self, clear: torch.Tensor | None = None) -> None:
        """One launch; none for no tokens. `clear`: a wide layer whose slot 0 is zeroed by it."""
        if self.loc.numel():
            quantise(self.buffer, self.loc, self.nope, self.rope, self.fp8, clear)
        elif clear is not None:
            clear[0].zero_()


def new_rows(
    pool: Any,
    layer: Any,
    loc: Any,
    nope: torch.Tensor,
    rope: torch.Tensor | None,
    last: tuple[Any, ...] | None = None,
) -> NewRows | None:
    """`nope` [tokens, 1, rank] and `rope` [tokens, 1, rope] for slots `loc`; None where stock must write.

    `last`: the layout of the last rows, which are known to be ours to write.
    """
    if not isinstance(loc, torch.Tensor):
        loc = getattr(loc, "loc", loc)
    if rope is None or not isinstance(loc, torch.Tensor):
        return None
    buffer = pool.kv_buffer[layer.layer_id - pool.start_layer]
    n, r = nope.shape, rope.shape
    if len(n) != 3 or n[1] != 1 or len(r) != 3 or r[1] != 1:
        nope, rope = nope.reshape(-1, n[-1]), rope.reshape(-1, r[-1])
        n, r = nope.shape, rope.shape
    layout = laid_out(buffer, loc, nope, rope)
    if layout == last:
        return NewRows(buffer, loc, nope, rope, pool.dtype, last)
    tokens, room = loc.numel(), buffer.shape
    is_plain = (
        nope.dtype in _WIDE
        and rope.dtype == nope.dtype
        and len(room) == 3
        and room[1] == 1
        and room[2] == n[-1] + r[-1]
        and buffer.stride()[-1] == nope.stride()[-1] == rope.stride()[-1] == 1
        and loc.is_contiguous()
        and n[0] >= tokens
        and r[0] >= tokens
    )
    return NewRows(buffer, loc, nope, rope, pool.dtype, layout) if is_plain else None


def laid_out(
    buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor
) -> tuple[Any, ...]:
    """All that these tensors are but where, on one device."""
    return (
        *(buffer.shape, buffer.stride(), loc.dtype, loc.shape, loc.stride()),
        *(nope.dtype, nope.shape, nope.stride(), rope.dtype, rope.shape, rope.stride()),
    )


def quantise(
    buffer: torch.Tensor,
    loc: torch.Tensor,
    nope: torch.Tensor,
    rope: torch.Tensor,
    fp8: torch.dtype,
    clear: torch.Tensor | None = None,
) -> None:
    """One launch. buffer uint8 [slots, 1, width], slot stride free; loc int32 or int64 [tokens]."""
    if not casts.on_device(buffer.device):
        n = loc.numel()
        row = torch.cat([nope[:n].reshape(n, -1), rope[:n].reshape(n, -1)], dim=1)
        buffer[loc.long()] = row.to(fp8).view(torch.uint8).unsqueeze(1)
        if clear is not None:
            clear[0].zero_()
        return
    casts.kernels("kv_write").write(buffer, loc, nope, rope, fp8, clear)
