"""The deferred cast: for one forward call the backend sees its pool through a view.

`PoolView.get_key_buffer` calls the real one (hierarchical cache waits there) and returns a `DeferredCast`.
When the method then asks it `.to(dtype)`, after the KV write, a strategy does the least work that gives the
attention kernel the same bits. A view lives for one call: at all other times the backend holds its own pool,
whose class other code checks and which MTP, TBO and hybrid backends swap or copy.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

_WIDE = (torch.bfloat16, torch.float16)


class Served(Protocol):
    """What becomes of a call's casts and writes."""

    def cast(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the method gets for `rows.to(dtype)`."""
        ...

    def write(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        """`pool.set_mla_kv_buffer(*args, **kwargs)`."""
        ...

    def passed_by(self) -> None:
        """The method asks its rows for something else than a cast to a wide dtype."""
        ...

    def settle(self) -> Any:
        """Somebody is about to read the pool: what waits to be written is written now."""
        ...


class DeferredCast:
    """Raw FP8 rows that become wide when asked. Everything else goes to the rows themselves."""

    __slots__ = ("_call", "_pool_rows")

    def __init__(self, rows: torch.Tensor, call: Served) -> None:
        self._pool_rows, self._call = rows, call

    @property
    def _rows(self) -> torch.Tensor:
        """The rows for somebody who reads them: what still waits to be written is written first."""
        self._call.settle()
        return self._pool_rows

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs and args[0] in _WIDE:
            return self._call.cast(self._pool_rows, args[0])
        dtype = _asked(self._pool_rows.device, *args, **kwargs)
        if dtype in _WIDE:
            return self._call.cast(self._pool_rows, dtype)
        self._call.passed_by()
        return self._rows.to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def raw(x: Any) -> Any:
            if isinstance(x, DeferredCast):
                return x._rows
            return type(x)(map(raw, x)) if type(x) in (list, tuple) else x

        return func(*raw(args), **{k: raw(v) for k, v in (kwargs or {}).items()})


def _asked(here: torch.device, *args: Any, **kwargs: Any) -> torch.dtype | None:
    """The dtype of a `Tensor.to` that only casts, however it is spelled, else None."""
    dtype = None
    for name, value in (*(("", a) for a in args), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            dtype, value = value.dtype, value.device
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, str | torch.device):
            there = torch.device(value)
            if there.type != here.type or there.index not in (None, here.index):
                return None
        elif name != "non_blocking" and value not in (None, False):
            # By position the first of these is non_blocking too, but a `copy` or a memory format may follow.
            return None
    return dtype


class PoolView:
    """A pool during one call: `isinstance` and every attribute are the real pool's."""

    __slots__ = ("_call", "_pool")

    def __init__(self, pool: Any, call: Served) -> None:
        # Past `__setattr__`, which is the pool's.
        _pool(self, pool)
        _call(self, call)

    @property
    def __class__(self) -> type:
        return type(object.__getattribute__(self, "_pool"))

    def __getattr__(self, name: str) -> Any:
        if "buffer" in name:
            # Whoever reads rows some other way finds them written.
            self._call.settle()
        return getattr(self._pool, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pool, name, value)

    def get_key_buffer(self, layer_id: int) -> Any:
        return DeferredCast(self._pool.get_key_buffer(layer_id), self._call)

    def set_mla_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._call.write(self._pool, *args, **kwargs)


_pool, _call = (vars(PoolView)[name].__set__ for name in ("_pool", "_call"))


def put_back(holder: Any, pool: Any) -> None:
    """`holder.token_to_kv_pool` was a view of `pool` and is `pool` again."""
    # Someone may have put another pool there meanwhile: that one stays.
    if type(getattr(holder, "token_to_kv_pool", None)) is PoolView:
        holder.token_to_kv_pool = pool
