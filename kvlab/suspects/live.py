"""What do the suspects cost alone, on this host? Products at decode shapes, routing, norms, all-reduces."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from kvlab import models
from kvlab.bench import timing
from kvlab.errors import BadInput
from kvlab.models import MlaGeometry
from kvlab.provenance import collect
from kvlab.suspects.collective import all_reduces
from kvlab.suspects.results import LiveRun, Product, Shape, Small
from kvlab.suspects.shapes import Linear, linears
from kvlab.weights import FORMATS

Call = Callable[[], object]
# Bytes that the copies of one weight may take together, so that none is in the L2 cache when its turn comes.
_COPIES_BYTES = 2 * 2**30
_E4M3_MAX = 448.0


def measure(
    *,
    model: str = "glm-5",
    tp: int = 8,
    batches: Sequence[int] = (1, 16),
    formats: Sequence[str] = ("bf16", "fp8", "nvfp4"),
    device: str = "cuda",
    ranks: Sequence[int] | None = None,
) -> LiveRun:
    """Time the parts of one rank's step on `device` ("cuda" or "cpu").

    `ranks` are the numbers of ranks to all-reduce over; None takes 1, 2, 4, … up to the host's cards. Raises
    BadInput without the device, for an unknown format or a shape that does not divide.
    """
    for fmt in formats:
        if fmt not in FORMATS:
            raise BadInput(f"--formats {fmt!r}: of {', '.join(FORMATS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--live: no CUDA device here; --device cpu runs the same calls on this machine")
    geometry = models.load(model)
    where = torch.device(device)
    torch.manual_seed(0)
    shapes = [_shape(geometry, tp, batch, formats, where) for batch in batches]
    reduces, skipped = all_reduces(
        device, [2 * b * (geometry.hidden_size or 0) for b in batches], ranks=ranks
    )
    return LiveRun(
        provenance=collect(env=("CUDA_VISIBLE_DEVICES",)),
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(),
        model=geometry.name,
        tp=tp,
        copy_bandwidth=_copy_bandwidth(where),
        kernel_us=_kernel_us(where),
        shapes=shapes,
        reduces=reduces,
        reduces_skipped=skipped,
    )


def time_us(calls: Sequence[Call], device: torch.device) -> float:
    """Median microseconds a call: one CUDA graph of all with the L2 flushed, or the clock on a CPU."""
    with torch.inference_mode():
        if device.type == "cuda":
            return timing.graph_us(calls, flush=timing.flusher(device))
        for call in calls:
            call()
        times = []
        for _ in range(3):
            start = time.perf_counter_ns()
            for call in calls:
                call()
            times.append((time.perf_counter_ns() - start) / 1e3 / len(calls))
        return statistics.median(times)


def _shape(geometry: MlaGeometry, tp: int, batch: int, formats: Sequence[str], device: torch.device) -> Shape:
    products = []
    for one in linears(geometry, tp=tp, batch=batch):
        for fmt in formats:
            products.append(product(one, fmt, device))
    return Shape(batch=batch, products=products, small=_small(geometry, batch, device))


def product(one: Linear, fmt: str, device: torch.device) -> Product:
    """Time one product. The expected numbers of experts and of tokens an expert are rounded up."""
    m, groups = max(1, math.ceil(one.m)), max(1, math.ceil(one.groups))
    size = int(FORMATS[fmt] / 8 * one.n * one.k * groups)
    reason, us = None, None
    maker = {"bf16": _bf16, "fp8": _fp8, "nvfp4": _fp4}[fmt]
    try:
        reason = _unsupported(fmt, one, device)
        if reason is None:
            calls = maker(m, one.n, one.k, groups, _copies(size, device), device)
            us = time_us(calls, device)
    except (RuntimeError, ValueError) as e:
        # torch names what its kernel for the format refuses; the rest of the run goes on.
        reason = " ".join(str(e).split())[:200]
    return Product(
        name=one.name,
        part=one.part,
        format=fmt,
        m=m,
        n=one.n,
        k=one.k,
        groups=groups,
        times=one.times,
        bytes=size,
        us=us,
        reason=reason,
    )


def _unsupported(fmt: str, one: Linear, device: torch.device) -> str | None:
    if fmt == "bf16":
        return None
    if device.type == "cpu":
        return f"{fmt} products are timed on a GPU only"
    capability = torch.cuda.get_device_capability(device)
    needed = {"fp8": (8, 9), "nvfp4": (10, 0)}[fmt]
    if capability < needed:
        return "no {} tensor cores before SM{}{}; this card is SM{}{}".format(fmt, *needed, *capability)
    if one.groups > 1:
        return f"torch has no batched {fmt} product"
    return None


def _copies(size: int, device: torch.device) -> int:
    """Copies of a weight that together are four times the L2 cache: as cold as the layers of a model."""
    if device.type == "cpu":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(math.ceil(4 * cache / size), max(2, _COPIES_BYTES // size), 64))


def _bf16(m: int, n: int, k: int, groups: int, copies: int, device: torch.device) -> list[Call]:
    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.bfloat16, device=device)

    if groups == 1:
        x, out = random(m, k), random(m, n)
        weights = [random(n, k) for _ in range(copies)]
        return [lambda w=w: torch.mm(x, w.T, out=out) for w in weights]
    x, out = random(groups, m, k), random(groups, m, n)
    weights = [random(groups, n, k) for _ in range(copies)]
    return [lambda w=w: torch.bmm(x, w.transpose(1, 2), out=out) for w in weights]


def _fp8(m: int, n: int, k: int, groups: int, copies: int, device: torch.device) -> list[Call]:
    # Rows are padded to 16, as the kernel asks.
    rows = -(-m // 16) * 16

    def random(*size: int) -> torch.Tensor:
        values = torch.randn(*size, device=device).clamp(-_E4M3_MAX, _E4M3_MAX)
        return values.to(torch.float8_e4m3fn)

    x, one = random(rows, k), torch.ones((), device=device)
    weights = [random(n, k) for _ in range(copies)]
    return [
        lambda w=w: torch._scaled_mm(x, w.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        for w in weights
    ]


def _fp4(m: int, n: int, k: int, groups: int, copies: int, device: torch.device) -> list[Call]:
    rows = -(-m // 128) * 128

    def packed(*size: int) -> torch.Tensor:
        raw = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
        return raw.view(torch.float4_e2m1fn_x2)

    def scales(count: int) -> torch.Tensor:
        # One FP8 scale for 16 values, in the kernel's tiles of 128 rows by 4.
        size = -(-count // 128) * 128 * (-(-(k // 16) // 4) * 4)
        return torch.ones(size, device=device).to(torch.float8_e4m3fn)

    x, of_x = packed(rows, k // 2), scales(rows)
    weights = [(packed(n, k // 2), scales(n)) for _ in range(copies)]
    return [
        lambda w=w, s=s: torch._scaled_mm(x, w.T, scale_a=of_x, scale_b=s, out_dtype=torch.bfloat16)
        for w, s in weights
    ]


def _small(geometry: MlaGeometry, batch: int, device: torch.device) -> list[Small]:
    g = geometry
    hidden, experts, top_k = g.hidden_size or 1, g.n_routed_experts or 1, g.num_experts_per_tok or 1
    moe = g.attention_layers - (g.first_k_dense_replace or 0)
    logits = torch.randn(batch, experts, device=device)
    bias = torch.randn(experts, device=device)
    x, residual = (torch.randn(batch, hidden, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)

    def route() -> torch.Tensor:
        """Sigmoid scores, the top-k by biased score, weights normalised, and tokens sorted by expert."""
        scores = logits.sigmoid()
        chosen = (scores + bias).topk(top_k, dim=-1, sorted=False).indices
        kept = scores.gather(-1, chosen)
        chosen.flatten().sort()
        return kept / kept.sum(-1, keepdim=True)

    def norm() -> torch.Tensor:
        """Residual add and RMS norm."""
        return torch.nn.functional.rms_norm(x + residual, (hidden,), weight)

    found = [
        ("top-k routing", "routing", moe, route),
        ("add and RMS norm", "elementwise", 2 * g.attention_layers, norm),
    ]
    return [
        Small(name=name, suspect=suspect, times=times, us=time_us([call] * 16, device))
        for name, suspect, times, call in found
    ]


def _copy_bandwidth(device: torch.device) -> float:
    size = 2**30 if device.type == "cuda" else 2**24
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (time_us([lambda: target.copy_(source)] * 2, device) / 1e6)


def _kernel_us(device: torch.device) -> float:
    one = torch.zeros(1, device=device)
    return time_us([lambda: one.add_(1)] * 200, device)
