"""MLA decode over FP8 rows for Hopper, in CUDA C++ compiled at first use (cuda/mla_*.cu say how they work).

One launch a call, no host synchronisation, lengths read on the device: a captured CUDA graph serves every
length. `supports` says why a call is not for this kernel; `mla_decode` takes the same arguments as
`kvlab.kernels.decode.mla_decode` and equals `kvlab.kernels.reference.mla_attention`.
"""

import ctypes
import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from kvlab.errors import BadInput
from kvlab.kernels import nvrtc
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.checks import WIDE_DTYPES, expect, rows_2d
from kvlab.kernels.direct import current_stream

RANK = 512
ROPES = (0, 64)
MAX_HEADS = 128
MAX_BATCH = 2048
CHUNK = 16  # tokens a slot of the load ring holds
ROW_PITCH = 592  # bytes a row takes in shared memory
SHARED_LIMIT = 227 << 10  # bytes a block may have on Hopper
MAX_CTAS = 384
MAX_RING = 32  # slots of the load ring, as mla_common.cuh has it
TICKET_BYTES = 4 * MAX_CTAS * 4


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel and how it is launched; `macros` are the file's own."""

    file: str
    entry: str
    columns: int  # query columns (heads x query tokens) an item holds
    threads: int
    macros: tuple[tuple[str, int], ...]
    own_shared: int  # bytes of shared memory that the file's own arrays take
    ctas_per_sm: int = 1
    min_span: int = 8  # chunks of CHUNK tokens that a CTA takes at least, a cluster that many a CTA
    overhead: int = 2  # what starting and ending an item costs, in chunks
    slack: int = 4  # chunks that a cluster may have more so that it has one item only
    cluster: int = 1  # CTAs that share an item and add up slices of its dims, or halves of its columns
    min_part: int = 8  # chunks that a CTA of a cluster takes at least
    ring_step: int = 1  # the ring's slots are a multiple of this
    align: int = 128  # of the ring behind the fixed bytes

    def source(self, rope: int, is_e5m2: bool, is_half: bool, **flags: bool) -> nvrtc.Source:
        """`flags`: multi, cap, paged, index64, off where not named."""
        given = {"NH": self.columns, "ROPE": rope, "E5M2": is_e5m2, "HALF": is_half}
        given |= {name.upper(): flags.get(name, False) for name in ("multi", "cap", "paged", "index64")}
        given |= {"CLUSTER": self.cluster, "FIXED_SHARED": self.fixed_shared}
        return nvrtc.Source(self.file, self.entry, nvrtc.defines(given) + self.macros)

    @property
    def fixed_shared(self) -> int:
        """Bytes of shared memory before the ring: `struct Shared` of the file, `struct Meeting` in it."""
        meeting = 8 * self.cluster * self.columns + 18 * MAX_RING + 16 + 3 * 128  # ready, flag; places
        return -(-(self.own_shared + meeting) // self.align) * self.align

    def most_ctas(self, device: int) -> int:
        """CTAs of the persistent grid at most."""
        return _sms(device) * self.ctas_per_sm // self.cluster * self.cluster

    def slots(self, ctas: int) -> int:
        """Places for partial results: two a CTA, and with clusters two each of those."""
        return 2 * ctas + (2 * ctas // self.cluster if self.cluster > 1 else 0)

    def workspace_bytes(self, device: int) -> int:
        """Bytes of scratch: tickets, running maxima and sums, partial results."""
        slots = self.slots(self.most_ctas(device))
        return TICKET_BYTES + slots * self.columns * (8 * self.cluster + RANK * 4)

    def layout(self, batch: int) -> tuple[int, int]:
        """Slots of the ring and bytes of dynamic shared memory for this batch."""
        schedule = 4 * (2 * (batch + 1) + 1)
        per_slot = CHUNK * ROW_PITCH
        budget = SHARED_LIMIT // self.ctas_per_sm - (1024 if self.ctas_per_sm > 1 else 0)
        slots = min((budget - self.fixed_shared - schedule) // per_slot, MAX_RING)
        slots -= slots % self.ring_step
        return slots, self.fixed_shared + slots * per_slot + schedule


def few_heads(
    columns: int,
    group: int,
    groups: int,
    *,
    rounds: int = 1,
    ctas_per_sm: int = 1,
    registers: int = 0,
    producer_registers: int = 0,
    producers: int = 4,
    q_shared: bool = False,
    probe: int = 0,
    min_span: int = 8,
    overhead: int = 2,
    cluster: int = 1,
    passes: int = 0,
) -> Variant:
    """mla_few_heads.cu: `groups` groups of `group` warps, each group on its own chunk of tokens.

    `passes`: of 128 tokens, that a CTA makes at most without a schedule (mla_few_short.cuh); 0: none.
    """
    n, warps = columns // 8, group * groups
    tiles = RANK // 16 * n // rounds
    shared = 16 * groups * 2 * group * n * 32  # exchange
    shared += 16 * groups * tiles * 32  # merge
    shared += (RANK + max(ROPES)) * columns * 2  # q
    shared += 8 * groups * columns + 4 * columns + 8 * groups  # ml, down, summed
    macros = {
        "G": group,
        "NG": groups,
        "MERGE_ROUNDS": rounds,
        "MIN_CTAS": ctas_per_sm,
        "REGISTERS": registers,
        "PRODUCER_REGISTERS": producer_registers,
        "PRODUCERS": producers,
        "Q_SHARED": q_shared,
        "PROBE": probe,
        "PASSES": passes,
    }
    return Variant(
        "mla_few_heads.cu",
        "kvlab_mla_few_heads",
        columns,
        32 * (warps + producers),
        nvrtc.defines(macros),
        shared,
        ctas_per_sm,
        min_span,
        overhead,
        ring_step=math.lcm(groups, producers // 2),
        cluster=cluster,
    )


def many_heads(
    columns: int, *, producers: int = 4, min_span: int = 8, overhead: int = 12, cluster: int = 1
) -> Variant:
    """mla_many_heads.cu: two warpgroups on tiles of 128 tokens, 32 or 64 columns."""
    shared = (RANK + max(ROPES) + 128) * columns * 2  # q, p
    shared += 4 * (8 + 4 + 1 + 2) * columns  # sums; base, scale, factor, shift; m; sees, top
    shared += 8 * (1 + columns // 16)  # a pair's barriers
    macros = {"REGISTERS": 240, "PRODUCER_REGISTERS": 24, "PRODUCERS": producers}
    return Variant(
        "mla_many_heads.cu",
        "kvlab_mla_many_heads",
        columns,
        32 * (8 + producers),
        nvrtc.defines(macros),
        shared,
        1,
        min_span,
        overhead,
        ring_step=producers // 2,
        cluster=cluster,
        align=1024,
    )


class _Params(ctypes.Structure):
    """`struct Params` of mla_common.cuh."""

    _fields_ = (
        [(n, ctypes.c_void_p) for n in ("q_nope", "q_pe", "rows", "table", "bounds", "q_indptr", "out")]
        + [(n, ctypes.c_void_p) for n in ("lse", "partial", "ml", "tickets")]
        + [(n, ctypes.c_int64) for n in ("table_stride", "qn_token", "qn_head", "qp_token", "qp_head")]
        + [(n, ctypes.c_int64) for n in ("out_token", "out_head")]
        + [(n, ctypes.c_int) for n in ("row_stride", "num_slots", "bs", "heads", "tokens", "page_size")]
        + [(n, ctypes.c_int) for n in ("causal", "num_ring", "overhead", "slack", "min_span", "min_part")]
        + [(n, ctypes.c_float) for n in ("scale", "cap_log2", "lse_factor", "v_scale")]
    )


_EIGHT = few_heads(8, 2, 4, overhead=8, passes=4)
_SIXTEEN = few_heads(16, 2, 4, rounds=2, registers=224, producer_registers=56, q_shared=True, overhead=8)
_ANY = 1 << 30
# Swept on an H200: for at most so many query columns a request, requests, and tokens a request that the
# table has room for, this variant. Clusters merge faster than a crowd of single CTAs, but those of 8 leave
# SMs unused, and whole items need no merging. Where there is little to do, narrow items start and merge
# sooner, though each block of columns reads the rows again. Up to 128 tokens a request nothing is shared out
# (mla_few_short.cuh), and a lone CTA is up sooner than a cluster.
_EIGHTS, _PAIRS = replace(_EIGHT, cluster=8), many_heads(32, cluster=2)
_CHOICES: tuple[tuple[int, int, int, Variant], ...] = (
    (16, 32, 128, _EIGHT),
    (64, 16, 128, _EIGHT),
    (_ANY, 8, 128, _EIGHT),
    (8, 4, _ANY, _EIGHTS),
    (8, 8, 1024, _EIGHTS),
    (8, _ANY, _ANY, _EIGHT),
    (16, 2, _ANY, _EIGHTS),
    (16, 4, 1024, _EIGHTS),
    (16, 8, _ANY, _EIGHT),
    (16, 16, 2048, _EIGHT),
    (16, _ANY, _ANY, _SIXTEEN),
    (64, 1, 1024, _EIGHTS),
    (64, 2, 2048, _EIGHT),
    (_ANY, 1, 2048, _EIGHT),
    (64, 2, _ANY, many_heads(32, cluster=8)),
    (64, 4, 2048, many_heads(32, cluster=8)),
    (_ANY, 1, _ANY, many_heads(32, cluster=8)),
    (_ANY, 2, 2048, many_heads(32, cluster=8)),
    (32, 66, _ANY, _PAIRS),
    (32, _ANY, _ANY, many_heads(32)),
    (_ANY, 8, _ANY, _PAIRS),
    (_ANY, 16, 2048, _PAIRS),
    (64, 32, 1024, _PAIRS),
    (64, 66, _ANY, many_heads(64, cluster=2, overhead=24)),
    (_ANY, 32, _ANY, many_heads(64, cluster=2, overhead=24)),
    (_ANY, _ANY, _ANY, many_heads(64)),
)
# The same for one query token a request, looked at first: only then is there a way without a schedule. 16
# columns an item read each row once. Their schedule costs 2 us more than without that way, so that tables
# with room for just what _SIXTEEN is best at go to it; with more room, most lengths are shorter.
_SIXTEENS = replace(_SIXTEEN, cluster=8, macros=nvrtc.defines(dict(_SIXTEEN.macros) | {"PASSES": 4}))
_SIXTEEN_PAIRS = replace(_SIXTEENS, cluster=2)
_CHOICES_OF_ONE: tuple[tuple[int, int, int, Variant], ...] = (
    *_CHOICES[:6],  # up to 128 tokens, and 8 columns
    (16, 2, _ANY, _SIXTEENS),
    (16, 4, 1024, _SIXTEENS),
    (16, 8, _ANY, _SIXTEEN_PAIRS),
    (16, 16, 4096, _SIXTEEN_PAIRS),
    (16, 32, 1024, _SIXTEEN_PAIRS),
    (16, 32, 8192, _SIXTEEN),
    (16, 32, _ANY, _SIXTEEN_PAIRS),
    (16, _ANY, _ANY, _SIXTEEN),
    (64, 1, 1024, _EIGHTS),
    (64, 2, 1024, _EIGHT),
    (_ANY, 1, 1024, _EIGHT),
    (64, 1, 8192, _SIXTEEN_PAIRS),
    (32, 2, 8192, _SIXTEEN_PAIRS),
    (64, 2, 4096, _SIXTEEN_PAIRS),
    (64, 4, 2048, _SIXTEEN_PAIRS),
    (64, 8, 1024, _SIXTEEN_PAIRS),
    (_ANY, 1, 4096, _SIXTEEN_PAIRS),
    (_ANY, 4, 1024, _SIXTEEN_PAIRS),
    *_CHOICES,
)


def choose(columns: int, batch: int, room: int = _ANY, *, is_single: bool = True) -> Variant:
    """The measured best variant for so many query columns (heads x query tokens) a request, and requests.

    `room`: tokens a request that the table can name at most, on average. `is_single`: whether each request
    has one query token.
    """
    rows = _CHOICES_OF_ONE if is_single else _CHOICES
    return next(v for c, b, r, v in rows if columns <= c and batch <= b and room <= r)


@cache
def _sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _why_not_device(device: int) -> str | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"compute capability {major}.{minor}, the kernel is for 9.0"
    try:
        nvrtc.library()
    except nvrtc.CompileError as e:
        return str(e)
    return None


def supports(
    q_nope: torch.Tensor, q_pe: torch.Tensor | None, rows: torch.Tensor, active: ActiveSlots
) -> str | None:
    """Why this kernel does not take such a call; None where it does. Reads shapes only, never the device."""
    if rows.device.type != "cuda":
        return f"rows are on {rows.device}, the kernel is for CUDA"
    if reason := _why_not_device(rows.device.index):
        return reason
    heads, rank = q_nope.shape[-2:]
    rope = 0 if q_pe is None else q_pe.shape[-1]
    if rank != RANK or rope not in ROPES:
        return (
            f"kv_lora_rank {rank} and rope {rope}, the kernel has {RANK} and {' or '.join(map(str, ROPES))}"
        )
    if heads > MAX_HEADS:
        return f"{heads} heads, at most {MAX_HEADS}"
    if active.batch > MAX_BATCH:
        return f"batch {active.batch}, at most {MAX_BATCH}"
    if rows.data_ptr() % 16 or rows.stride(0) % 16 or rows.stride(0) >= 2**31:
        return "rows that do not start at multiples of 16 bytes"
    for name, q in (("q_nope", q_nope), ("q_pe", q_pe)):
        if q is not None and (q.data_ptr() % 8 or q.stride(0) % 4 or q.stride(1) % 4):
            return f"{name} rows that do not start at multiples of 8 bytes"
    return None


def workspace_bytes(
    device: torch.device, columns: int, batch: int | None = None, variant: Variant | None = None
) -> int:
    """Bytes of scratch for calls of `batch` requests (None: any number) with these query columns each.

    The first TICKET_BYTES are tickets: zero before the first call, and left zero by each. One workspace
    serves calls that follow each other on a stream; streams that run at once need their own.
    """
    rows = [v for c, b, _, v in _CHOICES_OF_ONE if columns <= c and (batch or 1) <= b]
    variants = [variant] if variant else rows
    return max(v.workspace_bytes(device.index) for v in variants)


def columns_of(heads: int, tokens: int, batch: int, q_indptr: torch.Tensor | None) -> int:
    """Query columns a request: its heads, times its query tokens where it has several."""
    return heads * (1 if q_indptr is None else max(1, -(-tokens // max(1, batch))))


def specialise(
    variant: Variant,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    rows: torch.Tensor,
    active: ActiveSlots,
    q_indptr: torch.Tensor | None,
    logit_cap: float,
) -> nvrtc.Source:
    """What is compiled for such a call."""
    return variant.source(
        0 if q_pe is None else q_pe.shape[-1],
        rows.dtype == torch.float8_e5m2,
        q_nope.dtype == torch.float16,
        multi=q_indptr is not None or q_nope.shape[1] > variant.columns,
        cap=logit_cap > 0,
        paged=active.is_paged,
        index64=active.table.dtype == torch.int64,
    )


def mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    rows: torch.Tensor,
    active: ActiveSlots,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    q_indptr: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base2: bool = False,
    workspace: torch.Tensor | None = None,
    variant: Variant | None = None,
    keep: list["Launch"] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Absorbed MLA decode over FP8 rows on Hopper; equals `reference.mla_attention`.

    q_nope [tokens, heads, 512] and q_pe [tokens, heads, 64] (or None), BF16 or FP16, all strides but the last
    free; rows [slots, 576 (512)] float8_e4m3fn or float8_e5m2, row stride free; `q_indptr` int32 [bs + 1]
    bounds each request's query tokens (None: one each), causal among themselves. Writes `out` [tokens, heads,
    512] of Q's dtype and, where given, `lse` float32 [tokens, heads]: natural logarithm, base 2 with
    `lse_base2`. A token that sees nothing: out 0, lse -inf. `keep` gets the launch, for the next call of
    tensors that are laid out alike. Raises BadInput naming the argument that is wrong.
    """
    pool = rows_2d("rows", rows)
    device = pool.device
    expect("q_nope", q_nope, "[tokens, heads, 512]", dims=3, dtypes=WIDE_DTYPES, device=device)
    tokens, heads, _ = q_nope.shape
    if q_pe is not None:
        expect(
            "q_pe",
            q_pe,
            f"[{tokens}, {heads}, 64]",
            dtypes=(q_nope.dtype,),
            device=device,
            sizes=(tokens, heads, None),
        )
    if reason := supports(q_nope, q_pe, pool, active):
        raise BadInput(f"mla_decode on Hopper: {reason}")
    width = RANK + (0 if q_pe is None else q_pe.shape[2])
    expect("rows", pool, f"[slots, {width}]", sizes=(None, width))
    if q_indptr is None:
        if tokens != active.batch:
            raise BadInput(f"q_nope: expected one token a request, {active.batch} of them, got {tokens}")
    else:
        shape = f"[{active.batch + 1}]"
        expect("q_indptr", q_indptr, shape, dtypes=(torch.int32,), device=device, sizes=(active.batch + 1,))
    if active.device != device:
        raise BadInput(f"active: on {active.device}, rows are on {device}")
    if out is None:
        out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=device)
    else:
        shape = f"[{tokens}, {heads}, {RANK}] as q_nope"
        expect("out", out, shape, dtypes=(q_nope.dtype,), device=device, sizes=(tokens, heads, RANK))
        if out.data_ptr() % 4 or out.stride(0) % 2 or out.stride(1) % 2:
            raise BadInput("out: expected rows that start at multiples of 4 bytes")
    if lse is not None:
        expect(
            "lse", lse, f"[{tokens}, {heads}]", dtypes=(torch.float32,), device=device, sizes=(tokens, heads)
        )
        if not lse.is_contiguous():
            raise BadInput(f"lse: expected a contiguous [{tokens}, {heads}], got strides {lse.stride()}")
    if not tokens or not heads:
        return out, lse

    columns = columns_of(heads, tokens, active.batch, q_indptr)
    room = active.capacity // max(1, active.batch)
    variant = variant or choose(columns, active.batch, room, is_single=q_indptr is None)
    need = workspace_bytes(device, columns, active.batch, variant)
    if workspace is None:
        workspace = _own_workspace(device, need)
    elif workspace.numel() * workspace.element_size() < need:
        raise BadInput(f"workspace: expected at least {need} bytes, got {workspace.numel()}")

    ring, shared = variant.layout(active.batch)
    with torch.cuda.device(device):
        source = specialise(variant, q_nope, q_pe, pool, active, q_indptr, logit_cap)
        kernel = nvrtc.load(source, device.index)
    ctas = _grid(variant, kernel, device.index, shared)
    base = workspace.data_ptr()
    ml = base + TICKET_BYTES
    scale = sm_scale * k_scale
    params = _Params(
        q_nope=q_nope.data_ptr(),
        q_pe=None if q_pe is None else q_pe.data_ptr(),
        rows=pool.data_ptr(),
        table=active.table.data_ptr(),
        bounds=active.bounds.data_ptr(),
        q_indptr=None if q_indptr is None else q_indptr.data_ptr(),
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        partial=ml + variant.slots(ctas) * variant.cluster * variant.columns * 8,
        ml=ml,
        tickets=base,
        row_stride=pool.stride(0),
        table_stride=active.table.stride(0),
        qn_token=q_nope.stride(0),
        qn_head=q_nope.stride(1),
        qp_token=0 if q_pe is None else q_pe.stride(0),
        qp_head=0 if q_pe is None else q_pe.stride(1),
        out_token=out.stride(0),
        out_head=out.stride(1),
        num_slots=min(pool.shape[0], 2**31 - 1),
        bs=active.batch,
        heads=heads,
        tokens=tokens,
        page_size=active.page_size,
        causal=causal and q_indptr is not None,
        num_ring=ring,
        overhead=variant.overhead * variant.cluster,
        slack=variant.slack * variant.cluster,
        min_span=variant.min_span * variant.cluster,
        min_part=variant.min_part,
        scale=scale / logit_cap if logit_cap > 0 else scale / math.log(2),
        cap_log2=logit_cap / math.log(2) if logit_cap > 0 else 0.0,
        lse_factor=1.0 if lse_base2 else math.log(2),
        v_scale=k_scale,
    )
    launch = Launch(device, kernel, ctas, variant.threads, shared, params)
    launch()
    if keep is not None:
        keep.append(launch)
    return out, lse


class Launch:
    """A kernel and its parameters, ready. `again`: the same call of other tensors, laid out alike."""

    def __init__(
        self,
        device: torch.device,
        kernel: nvrtc.Kernel,
        ctas: int,
        threads: int,
        shared: int,
        params: ctypes.Structure,
    ) -> None:
        self._device, self._kernel, self._params = device, kernel, params
        self._cut = ctas, threads, shared

    def __call__(self) -> None:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._kernel.launch(*self._cut, stream, self._params)

    def again(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor | None, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The caller vouches for the layouts; workspace and tables are those of the call before."""
        p = self._params
        p.q_nope = q_nope.data_ptr()
        if q_pe is not None:
            p.q_pe = q_pe.data_ptr()
        p.rows, p.out = rows.data_ptr(), out.data_ptr()
        if torch.cuda.current_device() == self._device.index:
            self._kernel.launch(*self._cut, current_stream(self._device.index), p)
        else:
            self()


_grids: dict[tuple[Variant, int, int], int] = {}


def _grid(variant: Variant, kernel: nvrtc.Kernel, device: int, shared: int) -> int:
    """CTAs of the persistent grid: all that the device holds at once."""
    key = (variant, device, shared)
    if key not in _grids:
        ctas = variant.most_ctas(device)
        if variant.cluster > 1:
            with torch.cuda.device(device):
                clusters = kernel.max_clusters(variant.cluster, variant.threads, shared)
            ctas = min(ctas, clusters * variant.cluster)
        _grids[key] = ctas
    return _grids[key]


_workspaces: dict[tuple[int, int], torch.Tensor] = {}
# Outgrown by a later call, but captured graphs may hold their addresses.
_outgrown: list[torch.Tensor] = []


def _own_workspace(device: torch.device, need: int) -> torch.Tensor:
    """This stream's workspace; a capture that finds none gets one of the graph's own memory."""
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    found = _workspaces.get(key)
    if found is not None and found.numel() >= need:
        return found
    fresh = torch.zeros(need, dtype=torch.uint8, device=device)
    if not torch.cuda.is_current_stream_capturing():
        if found is not None:
            _outgrown.append(found)
        _workspaces[key] = fresh
    return fresh
