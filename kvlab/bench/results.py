"""What `kvlab bench` measures, as data; reading a recorded run needs no torch."""

import msgspec

from kvlab.provenance import Provenance


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds a layer, warm and with the L2 flushed. None where the result was wrong."""

    warm_us: float | None
    cold_us: float | None
    exact: bool
    tb_s: float | None = None


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """`slots` active. `bytes`: what casting just these reads and writes; `limit_us`: that at copy speed."""

    slots: int
    order: str
    bytes: int
    limit_us: float
    results: dict[str, Timing]


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A bare kernel over contiguous memory, L2 flushed. `growth` 2 writes twice what it reads, as a cast."""

    name: str
    growth: int
    bytes: int
    us: float
    tb_s: float


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """A warm launch that casts nothing: it ends at once, or when it has read how many slots there are."""

    programs: int
    threads: int
    reads: bool
    us: float


class MapTiming(msgspec.Struct, frozen=True, kw_only=True):
    """`slot_map` or `slot_list`, once a step."""

    tokens: int
    distinct: int
    us: float


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` that all read the same `prefix` tokens; L2 flushed. `how`: what the cast was given."""

    requests: int
    prefix: int
    how: str
    cold_us: float | None
    exact: bool


class InLoop(msgspec.Struct, frozen=True, kw_only=True):
    """What a cast adds to a layer of small kernels that wait for each other, L2 flushed before each pass."""

    slots: int
    us: float


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """One captured graph of one cast a layer, replayed with this many tokens."""

    tokens: int
    us: float


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of the sweep; `us` by slots and order, L2 flushed."""

    lanes: int
    unit: int
    warps: int
    grid: int
    native: bool
    us: dict[str, float]


class CastRun(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvlab bench cast` measures."""

    provenance: Provenance
    gpu: str
    l2_bytes: int
    layers: int
    pool_slots: int
    row_bytes: int
    kv_dtype: str
    dtype: str
    copies: list[Copy]
    shapes: list[Shape]
    maps: list[MapTiming]
    replays: list[Replay]
    sweep: list[Cut] = []
    # `slot_list`, once a step, of the tokens that `maps` has.
    lists: list[MapTiming] = []
    shared: list[Shared] = []
    in_loop: list[InLoop] = []
    floors: list[Floor] = []
