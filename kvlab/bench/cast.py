"""What does casting the active slots cost, beside stock's cast of the whole pool and a bare copy?"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from kvlab.bench.copies import floor, scatter, stream
from kvlab.bench.results import (
    CastRun,
    Copy,
    Cut,
    Floor,
    InLoop,
    MapTiming,
    Replay,
    Shape,
    Shared,
    Timing,
)
from kvlab.bench.timing import flusher, graph_us, replay_us
from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.cast import (
    Tuning,
    gather_cast,
    list_for,
    map_workspace,
    shadow_cast,
    slot_list,
    slot_map,
    tuning,
)
from kvlab.provenance import collect

FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SLOTS = (100, 1_000, 10_000, 100_000, 131_072)
ORDERS = ("sequential", "random")
PAGE_SIZES = (1, 16, 64, 128)
# Requests of one page table, where the cast's traffic is far above what a launch costs.
REQUESTS, MANY = 64, 100_000
SHARED = ((64, 2_048), (64, 8_192), (16, 100_000))
MAP_TOKENS = (1_000, 10_000, 100_000)
REPLAY_TOKENS = (0, 100, 1_000, 10_000, 50_000, 100_000, 200_000, 400_000)


class _Bench:
    """The pools of a model's layers, one buffer that they share, and calls over them."""

    def __init__(self, pool: int, width: int, layers: int, kv_dtype: str, dtype: str) -> None:
        self.device = torch.device("cuda")
        self.slots, self.width = pool, width
        raw = torch.randint(0, 256, (layers, pool, 1, width), dtype=torch.uint8, device=self.device)
        self.rows = [layer.view(FORMATS[kv_dtype]) for layer in raw]
        self.out = torch.zeros(pool, 1, width, dtype=DTYPES[dtype], device=self.device)
        self.flush = flusher(self.device)

    def bytes(self, slots: int) -> int:
        return slots * (3 * self.width + 4)

    def active(self, slots: int, order: str) -> ActiveSlots:
        drawn = torch.randperm(self.slots, device=self.device) if order == "random" else None
        indices = torch.arange(self.slots, device=self.device) if drawn is None else drawn
        indptr = torch.tensor([0, slots], dtype=torch.int32, device=self.device)
        return ActiveSlots.ragged(indices[:slots].to(torch.int32).contiguous(), indptr)

    def time(self, call: Callable[[torch.Tensor], object], *, replays: int = 11) -> tuple[float, float]:
        """(warm, cold): a graph over one layer many times, and over all layers once after a flush."""
        warm = graph_us([lambda: call(self.rows[0])] * min(len(self.rows), 20), replays=replays)
        cold = graph_us(
            [lambda r=r: call(r) for r in self.rows], flush=self.flush, replays=replays, warm_up=1
        )
        return warm, cold

    def expected(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        raw = self.rows[layer].view(torch.uint8)[slots].view(self.rows[layer].dtype)
        return raw.to(self.out.dtype).view(torch.int16)

    def timed(self, slots: int, call: Callable[[torch.Tensor], object], exact: bool) -> Timing:
        if not exact:
            return Timing(warm_us=None, cold_us=None, exact=False)
        warm, cold = self.time(call)
        return Timing(warm_us=warm, cold_us=cold, exact=True, tb_s=self.bytes(slots) / cold / 1e6)

    def shape(self, slots: int, order: str, copy_tb_s: float, stock: Timing) -> Shape:
        active = self.active(slots, order)
        at = active.table.long()
        results = {"stock": stock}

        self.out.view(torch.int16).fill_(_SENTINEL)
        shadow_cast(self.rows[1], self.out, active)
        got = self.out.view(torch.int16)
        others = torch.ones(self.slots, dtype=torch.bool, device=self.device)
        others[at] = False
        exact = bool((got[at] == self.expected(1, at)).all() and (got[others] == _SENTINEL).all())
        results["shadow"] = self.timed(slots, lambda r: shadow_cast(r, self.out, active), exact)

        listed = slot_list(active, list_for(self.slots, self.device))
        self.out.view(torch.int16).fill_(_SENTINEL)
        shadow_cast(self.rows[1], self.out, listed)
        exact = bool((got[at] == self.expected(1, at)).all() and (got[others] == _SENTINEL).all())
        results["shadow_list"] = self.timed(slots, lambda r: shadow_cast(r, self.out, listed), exact)

        for page_size in PAGE_SIZES if order == "sequential" else (1,):
            tables = self.paged(active, page_size)
            self.out.view(torch.int16).fill_(_SENTINEL)
            shadow_cast(self.rows[1], self.out, tables)
            exact = bool((got[at] == self.expected(1, at)).all() and (got[others] == _SENTINEL).all())
            results[f"shadow_paged_{page_size}"] = self.timed(
                slots, lambda r, t=tables: shadow_cast(r, self.out, t), exact
            )

        for page_size in (1, 64) if slots >= MANY else ():
            tables = self.of_many(slots, page_size, order)
            results[f"shadow_paged_{page_size}_of_{REQUESTS}"] = self.by_tables(tables)

        workspace = map_workspace(active, self.slots)
        found = slot_map(active, self.slots, workspace)
        self.out.view(torch.int16).fill_(_SENTINEL)
        gather_cast(self.rows[1], self.out, found)
        new = found.new_indices[:slots].long()
        exact = bool((got[new] == self.expected(1, at)).all() and (got[slots:] == _SENTINEL).all())
        results["gather"] = self.timed(slots, lambda r: gather_cast(r, self.out, found), exact)

        dtype = self.out.dtype
        naive = graph_us(
            [lambda r=r: r.view(torch.uint8)[at].view(r.dtype).to(dtype) for r in self.rows[:8]],
            flush=self.flush,
            replays=5,
        )
        results["torch_index"] = Timing(
            warm_us=None, cold_us=naive, exact=True, tb_s=self.bytes(slots) / naive / 1e6
        )
        return Shape(
            slots=slots,
            order=order,
            bytes=self.bytes(slots),
            limit_us=self.bytes(slots) / copy_tb_s / 1e6,
            results=results,
        )

    def paged(self, active: ActiveSlots, page_size: int) -> ActiveSlots:
        """The same slots as one request's page table."""
        pages = active.table[::page_size] // page_size
        n = active.table.numel()
        return ActiveSlots.paged(
            pages[None].contiguous(), torch.tensor([n], dtype=torch.int32, device=self.device), page_size
        )

    def of_many(self, slots: int, page_size: int, order: str) -> ActiveSlots:
        """A page table of as many tokens, or a page a request fewer; whole pages in this order."""
        pages = torch.arange(self.slots // page_size, device=self.device)
        if order == "random":
            pages = pages[torch.randperm(pages.numel(), device=self.device)]
        each = slots // REQUESTS // page_size
        table = pages[: REQUESTS * each].view(REQUESTS, each).to(torch.int32)
        lengths = torch.full((REQUESTS,), each * page_size, dtype=torch.int32, device=self.device)
        return ActiveSlots.paged(table, lengths, page_size)

    def by_tables(self, tables: ActiveSlots) -> Timing:
        """Their cast, which writes their slots and no other."""
        at = tables.distinct(self.slots)
        self.out.view(torch.int16).fill_(_SENTINEL)
        shadow_cast(self.rows[1], self.out, tables)
        got = self.out.view(torch.int16)
        others = torch.ones(self.slots, dtype=torch.bool, device=self.device)
        others[at] = False
        exact = bool((got[at] == self.expected(1, at)).all() and (got[others] == _SENTINEL).all())
        return self.timed(at.numel(), lambda r: shadow_cast(r, self.out, tables), exact)

    def copies(self) -> list[Copy]:
        """What bare kernels reach over one layer: torch's copy, ours, to twice the bytes, and row by row: all
        rows, and as many scattered ones as the largest shape below the pool has, in any order or the pool's.
        """
        one = self.rows[0].numel()
        same, twice = self.out.view(torch.uint8).view(-1)[:one], self.out.view(torch.uint8)
        cuts = [
            {"block": block, "warps": warps, "grid": grid}
            for block, warps, grid in ((1024, 8, 8), (2048, 8, 8), (1024, 4, 16), (2048, 8, 4), (1024, 8, 0))
        ]
        row_cuts = [{"lanes": lanes, "warps": warps} for lanes, warps in ((512, 8), (1024, 8), (256, 4))]
        tried = {
            ("torch copy", 1, one): [lambda r: same.copy_(r.view(torch.uint8).view(-1))],
            ("copy", 1, one): [lambda r, c=c: stream(r.view(torch.uint8), same, **c) for c in cuts],
            ("copy to twice the bytes", 2, one): [
                lambda r, c=c: stream(r.view(torch.uint8), twice, **c) for c in cuts
            ],
        }
        for name, n in (("rows", self.slots), (f"{SLOTS[-1]:,} rows", SLOTS[-1])):
            if n > self.slots:
                continue
            drawn = self.active(n, "random").table
            for order, at in (("random", drawn), ("the pool's", drawn.sort().values)):
                tried[f"{name} in {order} order to twice the bytes", 2, n * self.width] = [
                    lambda r, c=c, at=at: scatter(r.view(torch.uint8), self.out, at, **c) for c in row_cuts
                ]
        found = []
        for (name, growth, read), calls in tried.items():
            us = min(
                graph_us([lambda r=r, c=c: c(r) for r in self.rows[:8]], flush=self.flush, replays=5)
                for c in calls
            )
            size = read * (1 + growth) + (4 * read // self.width if "rows" in name else 0)
            found.append(Copy(name=name, growth=growth, bytes=size, us=us, tb_s=size / us / 1e6))
        return found

    def floors(self) -> list[Floor]:
        """Launches of as many programs as a cast has, and of one an SM, warm, that cast nothing."""
        cut, found = tuning(self.device), []
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        count, never = torch.ones(2, 4, dtype=torch.int32, device=self.device)
        for reads in (False, True):
            for programs in (sms, cut.grid * sms):
                call = partial(floor, count, never, programs=programs, warps=cut.warps, reads=reads)
                us = graph_us([call] * 20, replays=31)
                found.append(Floor(programs=programs, threads=32 * cut.warps, reads=reads, us=us))
        return found

    def maps(self, tokens: Sequence[int]) -> list[MapTiming]:
        """`slot_map` of two requests that share half of their slots."""
        found = []
        for n in tokens:
            active = self.sharing(2, n // 2)
            ws = map_workspace(active, self.slots)
            us = graph_us([lambda a=active, w=ws: slot_map(a, self.slots, w)] * 10)
            found.append(MapTiming(tokens=n, distinct=ws.count.item(), us=us))
        return found

    def lists(self, tokens: Sequence[int]) -> list[MapTiming]:
        """`slot_list` of the same requests."""
        found = []
        memory = list_for(self.slots, self.device)
        for n in tokens:
            active = self.sharing(2, n // 2)
            us = graph_us([lambda a=active: slot_list(a, memory)] * 10)
            found.append(MapTiming(tokens=n, distinct=memory.count.item(), us=us))
        return found

    def sharing(self, requests: int, prefix: int) -> ActiveSlots:
        """Requests that read the same `prefix` tokens, slots in random order."""
        one = torch.randperm(self.slots, device=self.device, dtype=torch.int32)[:prefix]
        steps = torch.arange(requests + 1, dtype=torch.int32, device=self.device)
        return ActiveSlots.ragged(one.repeat(requests), steps * prefix)

    def shared(self, requests: int, prefix: int) -> list[Shared]:
        """Their cast from the tables as they are, from a page table, and from the step's list."""
        active = self.sharing(requests, prefix)
        each = torch.full((requests,), prefix, dtype=torch.int32, device=self.device)
        ways = {
            "tables": active,
            "pages": ActiveSlots.paged(active.table.view(requests, prefix), each, 1),
            "list": slot_list(active, list_for(self.slots, self.device)),
        }
        at = active.table[:prefix].long()
        got, found = self.out.view(torch.int16), []
        for how, source in ways.items():
            got.fill_(_SENTINEL)
            shadow_cast(self.rows[1], self.out, source)
            exact = bool((got[at] == self.expected(1, at)).all())
            us = None
            if exact:
                calls = [lambda r=r, s=source: shadow_cast(r, self.out, s) for r in self.rows[:16]]
                us = graph_us(calls, flush=self.flush, replays=7)
            found.append(Shared(requests=requests, prefix=prefix, how=how, cold_us=us, exact=exact))
        return found

    def in_loop(self, slots: int) -> InLoop:
        """A layer is three small kernels, one after the other, with the cast before the last or without."""
        active = self.active(slots, "random")
        a, b = torch.zeros(2, 8192, device=self.device)

        def pass_through(with_cast: bool) -> None:
            for r in self.rows:
                torch.add(a, 1, out=b)
                torch.add(b, 1, out=a)
                if with_cast:
                    shadow_cast(r, self.out, active)
                torch.add(a, 1, out=b)

        with_it, without = (
            graph_us([lambda w=w: pass_through(w)], flush=self.flush, replays=11) for w in (True, False)
        )
        return InLoop(slots=slots, us=(with_it - without) / len(self.rows))

    def replays(self, tokens: Sequence[int]) -> list[Replay]:
        """One graph, captured once at full capacity; only the lengths change."""
        active = self.active(self.slots, "random")
        graph = torch.cuda.CUDAGraph()
        shadow_cast(self.rows[0], self.out, active)
        with torch.cuda.graph(graph):
            for r in self.rows:
                shadow_cast(r, self.out, active)
        found = []
        for n in tokens:
            active.bounds[1] = min(n, self.slots)
            us = replay_us(graph, flush=self.flush, replays=7) / len(self.rows)
            found.append(Replay(tokens=min(n, self.slots), us=us))
        return found

    def sweep(self, cuts: Sequence[Tuning], slots: Sequence[int]) -> list[Cut]:
        """Each cut at each size and order, L2 flushed."""
        found = []
        for cut in cuts:
            us = {}
            for n, order in itertools.product(slots, ORDERS):
                active = self.active(n, order)
                calls = [lambda r=r, c=cut, a=active: shadow_cast(r, self.out, a, cut=c) for r in self.rows]
                us[f"{n} {order}"] = graph_us(calls, flush=self.flush, replays=5, warm_up=1)
            fields = {f: getattr(cut, f) for f in ("lanes", "unit", "warps", "grid", "native")}
            found.append(Cut(**fields, us=us))
        return found


# No FP8 code widens to this pattern.
_SENTINEL = 0x5A5B


def measure(
    *,
    pool: int = 495_552,
    width: int = 576,
    layers: int = 78,
    kv_dtype: str = "fp8_e4m3",
    dtype: str = "bf16",
    sweep: bool = False,
) -> CastRun:
    """Measure on this host's GPU. `layers` pools of `pool` slots are allocated, 22 GB for 78 of 495,552.

    `sweep`: time the `candidates` besides. Raises BadInput without a GPU or where the pools do not fit.
    """
    if not torch.cuda.is_available():
        raise BadInput("bench cast: no CUDA device here; --recorded prints the newest recorded run")
    need, (free, _) = pool * width * (layers + 5), torch.cuda.mem_get_info()
    if need > free:
        raise BadInput(f"--layers: {layers} layers need {need} bytes, {free} are free on this GPU; use fewer")
    bench = _Bench(pool, width, layers, kv_dtype, dtype)
    copies = bench.copies()
    best = max(c.tb_s for c in copies if "random" not in c.name)
    wide = DTYPES[dtype]
    stock_calls = [lambda r=r: r.to(wide) for r in bench.rows[:4]]
    stock = Timing(
        warm_us=graph_us([stock_calls[0]] * 4, replays=5),
        cold_us=(us := graph_us(stock_calls, flush=bench.flush, replays=5)),
        exact=True,
        tb_s=bench.bytes(pool) / us / 1e6,
    )
    sizes = [n for n in (*SLOTS, pool) if n <= pool]
    shapes = [bench.shape(n, order, best, stock) for n in sizes for order in ORDERS]
    properties = torch.cuda.get_device_properties(bench.device)
    return CastRun(
        provenance=collect(),
        gpu=properties.name,
        l2_bytes=properties.L2_cache_size,
        layers=layers,
        pool_slots=pool,
        row_bytes=width,
        kv_dtype=kv_dtype,
        dtype=dtype,
        copies=copies,
        floors=bench.floors(),
        shapes=shapes,
        maps=bench.maps([n for n in MAP_TOKENS if n <= pool]),
        lists=bench.lists([n for n in MAP_TOKENS if n <= pool]),
        shared=[t for requests, prefix in SHARED if prefix <= pool for t in bench.shared(requests, prefix)],
        in_loop=[bench.in_loop(n) for n in (100, 1_000, 10_000) if n <= pool],
        replays=bench.replays([n for n in REPLAY_TOKENS if n <= pool]),
        sweep=bench.sweep(candidates(), [n for n in (1_000, 10_000, 131_072) if n <= pool]) if sweep else [],
    )


def candidates() -> list[Tuning]:
    """What `--sweep` compares: the shipped cut, its neighbours, narrow lanes, integers instead of native."""
    shipped = tuning(torch.device("cuda", torch.cuda.current_device()))
    others = [
        (1024, 8, 8, 4),
        (1024, 8, 4, 4),
        (2048, 8, 16, 2),
        (512, 16, 8, 3),
        (512, 16, 8, 4),
        (512, 8, 8, 6),
    ]
    fields = ("lanes", "unit", "warps", "grid")
    found = [replace(shipped, **dict(zip(fields, cut, strict=True))) for cut in others]
    return [shipped, *found, replace(shipped, native=False)]
