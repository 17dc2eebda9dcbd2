"""The deferred cast: for one forward call the backend sees its pool through a view.

`PoolView.get_key_buffer` calls the real one (hierarchical cache waits there) and returns a `DeferredCast`.
When the method then asks it `.to(dtype)`, after the KV write, a strategy does the least work that gives the
attention kernel the same bits. A view lives for one call: at all other times the backend holds its own pool,
whose class other code checks and which MTP, TBO and hybrid backends swap or copy.
"""

from collections.abc import Callable
from typing import Any

import torch

_WIDE = (torch.bfloat16, torch.float16)


class DeferredCast:
    """Raw FP8 rows that become wide when asked. Everything else goes to the rows themselves."""

    __slots__ = ("_cast", "_pool_rows", "_settle")

    def __init__(
        self,
        rows: torch.Tensor,
        cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
        settle: Callable[[], Any] = lambda: None,
    ) -> None:
        self._pool_rows, self._cast, self._settle = rows, cast, settle

    @property
    def _rows(self) -> torch.Tensor:
        """The rows for somebody who reads them: what still waits to be written is written first."""
        self._settle()
        return self._pool_rows

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs and args[0] in _WIDE:
            return self._cast(self._pool_rows, args[0])
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


class PoolView:
    """A pool during one call: `isinstance` and every attribute are the real pool's."""

    __slots__ = ("_cast", "_pool", "_settle", "_write")

    def __init__(
        self,
        pool: Any,
        cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
        write: Callable[..., None],
        settle: Callable[[], Any] = lambda: None,
    ) -> None:
        # Past `__setattr__`, which is the pool's.
        _pool(self, pool)
        _cast(self, cast)
        _write(self, write)
        _settle(self, settle)

    @property
    def __class__(self) -> type:
        return type(object.__getattribute__(self, "_pool"))

    def __getattr__(self, name: str) -> Any:
        if "buffer" in name:
            # Whoever reads rows some other way finds them written.
            self._settle()
        return getattr(self._pool, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pool, name, value)

    def get_key_buffer(self, layer_id: int) -> Any:
        rows = self._pool.get_key_buffer(layer_id)
        return DeferredCast(rows, self._cast, self._settle)

    def set_mla_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._write(self._pool, *args, **kwargs)


_pool, _cast, _write, _settle = (
    vars(PoolView)[name].__set__ for name in ("_pool", "_cast", "_write", "_settle")
)


def is_view(pool: Any) -> bool:
    return type(pool) is PoolView


class seen_through:
    """`holder.token_to_kv_pool` is `view` inside, and the very pool again outside."""

    # A class: a generator's context manager costs a layer's call twice as much.

    __slots__ = ("_holder", "_view")

    def __init__(self, holder: Any, view: PoolView) -> None:
        self._holder, self._view = holder, view

    def __enter__(self) -> None:
        self._holder.token_to_kv_pool = self._view

    def __exit__(self, *_: object) -> None:
        # Someone may have put another pool there meanwhile: that one stays.
        if is_view(getattr(self._holder, "token_to_kv_pool", None)):
            self._holder.token_to_kv_pool = self._view._pool
