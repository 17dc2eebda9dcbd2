"""What does a layer's decode attention over FP8 rows cost, for us and for everybody else, how exactly?"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from kvlab.bench.attention_results import (
    ON_REQUEST,
    ROWS,
    WRONG_ABOVE,
    AttentionRun,
    AttentionShape,
    LengthReplay,
    Row,
    write,
)
from kvlab.bench.copies import stream
from kvlab.bench.peers import BUILDERS, FLASHMLA_PAGE, LATENT, ROPE, Absent, Call, Problem, first_line
from kvlab.bench.timing import flusher, graph_us, replay_us
from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.decode import why_not_cuda
from kvlab.kernels.reference import mla_attention
from kvlab.provenance import collect

WIDTH = LATENT + ROPE
HEADS = (8, 16, 64, 128)
GRID = tuple(
    [n] * b
    for b, n in (
        (1, 100),
        (1, 1024),
        (1, 8192),
        (1, 32768),
        (1, 131072),
        (16, 1024),
        (16, 8192),
        (64, 1024),
        (64, 4096),
        (128, 2048),
    )
)
UNEQUAL = ([131_072] + [100] * 63,)
# DeepSeek's and GLM-5's absorbed MLA: the scale of the head dimension before absorption.
SM_SCALE = (128 + 64) ** -0.5
# What is slow by its very nature is timed over fewer calls.
_FEW = ("stock",)


class ContextLost(Exception):
    """A row left the GPU context unusable: nothing more can be measured in this process."""


class _Bench:
    """Layers' pools, as FP8 and as BF16, and the problems over them."""

    def __init__(self, pool: int, layers: int) -> None:
        self.device = torch.device("cuda")
        self.flush = flusher(self.device)
        g = torch.Generator(self.device).manual_seed(0)
        self.rows, self.wide = [], []
        for _ in range(layers):
            values = torch.randn(pool, 1, WIDTH, generator=g, device=self.device)
            self.rows.append(values.to(torch.float8_e4m3fn))
            self.wide.append(self.rows[-1].to(torch.bfloat16))
        self.shadow = torch.zeros_like(self.wide[0])
        self.scratch: dict[str, torch.Tensor] = {}

    def problem(self, lengths: Sequence[int], heads: int) -> Problem:
        """Random pages of 64 slots, page 0 left out; the slots within a page in order."""
        g = torch.Generator(self.device).manual_seed(sum(lengths) + heads)
        pages = [-(-n // FLASHMLA_PAGE) for n in lengths]
        most = self.rows[0].shape[0] // FLASHMLA_PAGE
        drawn = torch.randperm(most - 1, generator=g, device=self.device)[: sum(pages)].int().cpu() + 1
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for row, mine in zip(table, drawn.split(pages), strict=True):
            row[: mine.numel()] = mine
        offset = torch.arange(FLASHMLA_PAGE, dtype=torch.int32)
        slots = [
            (row[:n, None] * FLASHMLA_PAGE + offset).flatten()[:length]
            for row, n, length in zip(table, pages, lengths, strict=True)
        ]
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        q = torch.randn(len(lengths), heads, WIDTH, generator=g, device=self.device).bfloat16()
        return Problem(
            q_nope=q[..., :LATENT].contiguous(),
            q_pe=q[..., LATENT:].contiguous(),
            rows=self.rows,
            wide=self.wide,
            shadow=self.shadow,
            active=ActiveSlots.ragged(torch.cat(slots).to(self.device), bounds.to(self.device)),
            lengths=list(lengths),
            table=table.to(self.device),
            sm_scale=SM_SCALE,
            scratch=self.scratch,
        )

    def row(self, name: str, p: Problem, want: torch.Tensor) -> Row:
        """One row measured, or the reason why there is no time."""
        try:
            call = BUILDERS[name](p)
            got = call(0).double()
            error = ((got - want).norm() / want.norm()).item()
            if not error <= WRONG_ABOVE:
                return Row(error=error if error == error else None, note=f"wrong: error {error:.3g}")
            us, cold_us = self.time(call, few=name in _FEW)
        except Absent as e:
            return Row(note=f"absent: {e}")
        except Exception as e:  # A peer may fail in any way: name it and go on, where the GPU still can.
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise ContextLost(f"{name}: {first_line(e)}") from e
            return Row(note=f"failed: {first_line(e)}")
        size = sum(p.lengths) * WIDTH * (2 if name == "control_bf16" else 1)
        return Row(us=us, cold_us=cold_us, error=error, tb_s=size / cold_us / 1e6)

    def replays(self, heads: int, batch: int, most: int) -> list[LengthReplay]:
        """One graph of `fused` over all layers, captured at `most` tokens a request; lengths alone change."""
        p = self.problem([most] * batch, heads)
        call = BUILDERS["fused"](p)
        call(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(len(self.rows)):
                call(layer)
        found = []
        steps = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        for n in [most * k // 8 for k in range(9)]:
            p.active.bounds.copy_(steps * n)
            us = replay_us(graph, flush=self.flush, replays=5, warm_up=1) / len(self.rows)
            found.append(LengthReplay(tokens=batch * n, us=us))
        return found

    def time(self, call: Call, *, few: bool) -> tuple[float, float]:
        """(warm, cold) microseconds a call."""
        calls = [lambda i=i: call(i) for i in range(len(self.rows))]
        if few:
            once = graph_us(calls[:2], replays=3, warm_up=1)
            return once, graph_us(calls[:2], flush=self.flush, replays=3, warm_up=1)
        probe = graph_us(calls[:1] * 2, replays=3, warm_up=1)
        many = max(2, min(20, int(1500 / probe)))
        return (
            graph_us(calls[:1] * many, replays=9, warm_up=1),
            graph_us(calls, flush=self.flush, replays=9, warm_up=1),
        )


def measure(
    *,
    lengths: Iterable[Sequence[int]] = (*GRID, *UNEQUAL),
    heads: Iterable[int] = HEADS,
    rows: Sequence[str] = tuple(ROWS),
    pool: int = 495_552,
    layers: int = 8,
    seconds: float | None = None,
    out: Path | None = None,
    prepare: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> AttentionRun:
    """Measure on this host's GPU, head count by head count.

    `out` is rewritten after each shape, so that a run that is cut short keeps what it has; `seconds` ends it
    between shapes. `prepare` compiles what the rows need first, in processes side by side. Raises BadInput
    without a GPU, for an unknown row, or where a shape does not fit the pool.
    """
    lengths, heads = [list(n) for n in lengths], list(heads)
    known = ROWS | ON_REQUEST
    if unknown := [r for r in rows if r not in known]:
        raise BadInput(f"--only: expected names among {', '.join(known)}, got {unknown[0]!r}")
    for n in lengths:
        pages = sum(-(-length // FLASHMLA_PAGE) for length in n)
        if pages >= pool // FLASHMLA_PAGE:
            need = (pages + 1) * FLASHMLA_PAGE
            raise BadInput(f"--pool: this shape needs {need} slots, the pool has {pool}")
    if not torch.cuda.is_available():
        raise BadInput("bench attention: no CUDA device here; --recorded prints the newest recorded run")
    started = time.monotonic()
    pool -= pool % FLASHMLA_PAGE
    if prepare:
        _prepare(rows, heads, {len(n) for n in lengths}, say)
    bench = _Bench(pool, layers)
    properties = torch.cuda.get_device_properties(bench.device)
    copy = _copy_tb_s(bench)
    shapes: list[AttentionShape] = []
    replays: list[LengthReplay] = []
    provenance = collect()
    example = bench.problem([1], heads[0])
    reason = why_not_cuda(example.q_nope, example.q_pe, bench.rows[0], example.active)

    def run(ended_by: str = "") -> AttentionRun:
        found = AttentionRun(
            provenance=provenance,
            gpu=properties.name,
            l2_bytes=properties.L2_cache_size,
            copy_tb_s=copy,
            pool_slots=pool,
            layers=layers,
            row_bytes=WIDTH,
            kv_dtype="fp8_e4m3",
            q_dtype="bf16",
            slots=f"random pages of {FLASHMLA_PAGE}, tokens of a page in order",
            wrong_above=WRONG_ABOVE,
            why_not_cuda=reason,
            shapes=list(shapes),
            replays=list(replays),
            ended_by=ended_by,
        )
        if out is not None:
            write(out, found)
        return found

    try:
        if "fused" in rows:
            replays += bench.replays(
                heads[0], 64, min(4096, (pool - FLASHMLA_PAGE) // 64 // FLASHMLA_PAGE * 64)
            )
        for h in heads:
            for n in lengths:
                if seconds is not None and time.monotonic() - started > seconds:
                    say(f"stopped after {seconds:.0f} s with {len(shapes)} shapes measured")
                    return run(f"--seconds {seconds:.0f}")
                shapes.append(_shape(bench, n, h, rows, copy))
                say(_line(shapes[-1]))
                run()
    except ContextLost as e:
        say(f"the GPU context is lost, {len(shapes)} shapes measured: {e}")
        return run(str(e))
    return run()


def _shape(
    bench: _Bench, lengths: Sequence[int], heads: int, rows: Sequence[str], copy_tb_s: float
) -> AttentionShape:
    p = bench.problem(lengths, heads)
    want, _ = mla_attention(p.q_nope, p.q_pe, p.rows[0], p.active, sm_scale=SM_SCALE, dtype=torch.float64)
    size = sum(lengths) * WIDTH
    return AttentionShape(
        batch=len(lengths),
        context=max(lengths),
        heads=heads,
        bytes=size,
        limit_us=size / copy_tb_s / 1e6,
        results={name: bench.row(name, p, want) for name in rows},
        lengths=None if len(set(lengths)) == 1 else list(lengths),
    )


def _line(shape: AttentionShape) -> str:
    times = (f"{k} {r.us:.1f}" if r.us else f"{k} -" for k, r in shape.results.items())
    return f"{shape.heads} heads, {shape.name}: {', '.join(times)}"


def _copy_tb_s(bench: _Bench) -> float:
    """The best bare copy of a layer's bytes, read plus written, L2 flushed."""
    source, target = bench.rows[0].view(torch.uint8), bench.shadow.view(torch.uint8).view(-1)
    target = target[: source.numel()]
    cuts = [{"block": 1024, "warps": 8, "grid": 8}, {"block": 2048, "warps": 8, "grid": 4}]
    us = min(
        graph_us([lambda c=c: stream(source, target, **c)] * 4, flush=bench.flush, replays=5) for c in cuts
    )
    return 2 * source.numel() / us / 1e6


def _prepare(
    rows: Sequence[str], heads: Sequence[int], batches: set[int], say: Callable[[str], object]
) -> None:
    """Fill the compilers' caches (flashinfer's nvcc, Triton's), a process a row and head count."""
    started = time.monotonic()
    per_heads = [r for r in rows if r in ("fused", "fused_triton", "fused_cuda", "sglang_triton")]
    tasks = [(r, h) for r in per_heads for h in heads]
    tasks += [(r, heads[0]) for r in rows if r not in per_heads]
    command = [sys.executable, "-m", "kvlab.bench.attention"]
    # A process that fails here says so again, by name, when its row is measured.
    running = [
        subprocess.Popen(
            [*command, r, str(h), *(str(b) for b in sorted(batches))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for r, h in tasks
    ]
    for p in running:
        p.wait()
    say(f"compiled what {len(rows)} rows need in {time.monotonic() - started:.0f} s")


def _warm(row: str, heads: int, batches: Sequence[int]) -> None:
    """Run one row once a batch size, on a small pool."""
    bench = _Bench(64 * (2 * max(batches) + 2), 1)
    for b in batches:
        BUILDERS[row](bench.problem([100] * b, heads))(0)
    torch.cuda.synchronize()


if __name__ == "__main__":
    _warm(sys.argv[1], int(sys.argv[2]), [int(b) for b in sys.argv[3:]])
