"""What the experiments found, as it is recorded."""

from __future__ import annotations

import msgspec

from kvlab.inspection import Kept


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that says which slots are active: after capture, after a replay, and what is true then."""

    name: str
    captured: list[int]
    replayed: list[int]
    true: list[int]

    @property
    def is_fresh(self) -> bool:
        return self.replayed == self.true


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A cast of the active rows under replay, by what it takes for the lengths.

    `kept_bytes` is the wide memory that lasts, `stock_bytes` one layer of the pool as stock casts it.
    """

    lengths: str
    aliased: bool
    cast_rows: int
    read_rows: int
    is_same: bool
    error: float
    kept_bytes: int
    stock_bytes: int


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One way of casting less, over two steps with the same queries; `layout`: how the slots lie.

    `tables_as_before`: the request table and the wrapper's index buffer, the very tensor, after both steps.
    """

    name: str
    layout: str
    first_is_same: bool
    second_is_same: bool
    pool_bytes_changed: int
    pool_bytes: int
    plans_per_step: int
    layers: int
    kept_bytes: int
    tables_as_before: bool


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """Requests on one prefix: rows of a strategy's wide buffer, and those that the kernel is sent to."""

    name: str
    requests: int
    prefix: int
    pool_slots: int
    rows: int
    cast: int
    is_same: bool


class Careless(msgspec.Struct, frozen=True, kw_only=True):
    """A compact buffer handed to `run` with the indices of the pool: did anything refuse it?"""

    compact_rows: int
    largest_index: int
    past_the_end: int
    raised: str


class Decorated(msgspec.Struct, frozen=True, kw_only=True):
    """What `@flashinfer_api` makes of a function: by default, and with its logging on."""

    is_the_function: bool
    unwraps_to_the_function: bool
    result_is_the_function_s: bool
    logged: str


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan` keeps, and whether `run` reads it."""

    kept: Kept
    is_read: bool


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One flashinfer release: what its `run` reads of what `plan` kept, how often `plan` asks the host."""

    release: str
    reads: list[str]
    host_copies: int
    checks: int
    decorators: list[str]


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the chapter shows."""

    sglang: str
    flashinfer: str
    file: str
    plan_line: int
    run_line: int
    frozen: list[Frozen]
    releases: list[Release]
    buffers: list[Buffer]
    readings: list[Reading]
    variants: list[Variant]
    shared: list[Shared]
    careless: Careless
    decorated: Decorated
