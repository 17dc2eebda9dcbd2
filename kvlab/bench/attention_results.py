"""What `kvlab bench attention` measures, as data, and what follows from it; needs no torch."""

import math
from pathlib import Path

import msgspec

from kvlab import outputs
from kvlab.provenance import Provenance

# Every row of the benchmark and what it is, in the order of its tables.
ROWS = {
    "stock": "SGLang as it is: the whole pool cast to BF16, then flashinfer fa3",
    "gather": "active rows cast to compact BF16 rows, then flashinfer fa3",
    "shadow": "active rows cast to their places in one BF16 layer, then flashinfer fa3",
    "fused": "kvlab's decode over the FP8 rows, the backend it picks itself",
    "fused_triton": "kvlab's decode, the Triton kernels",
    "control_bf16": "flashinfer fa3 over rows that are BF16 already: no cast at all",
    "native_fp8_fa3": "flashinfer fa3 over FP8 rows",
    "native_fp8_fa2": "flashinfer fa2 over FP8 rows",
    "sglang_triton": "SGLang's Triton decode over FP8 rows (Q rounded to FP8)",
    "flashmla_fp8": "FlashMLA over FP8 rows, pages of 64 (Q rounded to FP8)",
}
# Measured on request alone (`--only`): `fused` is one of them at each shape.
ON_REQUEST = {"fused_cuda": "kvlab's decode, the CUDA kernels"}
# Alternatives as accurate as BF16 attention: what a fused kernel has to beat.
ACCURATE = ("gather", "shadow", "native_fp8_fa3", "native_fp8_fa2")
OURS = ("fused", "fused_triton")
# A relative error above this is a wrong result, not a rounding: Q in FP8 costs 3 to 4 %.
WRONG_ABOVE = 0.1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row at one shape. A row without a time says why in `note`.

    `us` is a layer's median from CUDA-graph replay with everything warm; `cold_us` each call on another
    layer's pool after an L2 flush. `error` is |out - reference| / |reference|, Frobenius, against float64.
    `tb_s` is the bytes of the rows that it must read (FP8; BF16 for the control) over `cold_us`.
    """

    us: float | None = None
    cold_us: float | None = None
    error: float | None = None
    tb_s: float | None = None
    note: str = ""


class AttentionShape(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of equal contexts, or `lengths` where they differ (`context` is then the longest).

    `limit_us`: the active rows' FP8 bytes at the copy speed of the same run.
    """

    batch: int
    context: int
    heads: int
    bytes: int
    limit_us: float
    results: dict[str, Row]
    lengths: list[int] | None = None

    @property
    def name(self) -> str:
        if self.lengths is None:
            return f"{self.batch} x {self.context:,}"
        shortest = min(self.lengths)
        return f"1 x {self.context:,} + {self.batch - 1} x {shortest:,}"

    def best_accurate(self) -> tuple[str, float] | None:
        """The fastest of the accurate alternatives, warm; None where none was measured."""
        timed = [(n, us) for n in ACCURATE if n in self.results and (us := self.results[n].us) is not None]
        return min(timed, key=lambda t: t[1], default=None)


class LengthReplay(msgspec.Struct, frozen=True, kw_only=True):
    """One captured graph of `fused`, replayed with `tokens` active tokens in all, L2 flushed."""

    tokens: int
    us: float


class AttentionRun(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvlab bench attention` measures. `copy_tb_s`: the best bare copy, read and written bytes."""

    provenance: Provenance
    gpu: str
    l2_bytes: int
    copy_tb_s: float
    pool_slots: int
    layers: int
    row_bytes: int
    kv_dtype: str
    q_dtype: str
    slots: str
    wrong_above: float
    why_not_cuda: str | None
    shapes: list[AttentionShape]
    replays: list[LengthReplay] = []
    # Where a row's failure took the GPU context with it, and so ended the run.
    ended_by: str = ""

    def geomean(self, heads: int, over: str, *, row: str = "fused") -> float | None:
        """Geometric mean over the equal-context shapes of `row` over another row, or over "accurate"."""
        logs = []
        for s in self.shapes:
            if s.heads != heads or s.lengths is not None or row not in s.results:
                continue
            if s.results[row].us is None:
                continue
            if over == "accurate":
                best = s.best_accurate()
                other = best[1] if best else None
            else:
                other = s.results[over].us if over in s.results else None
            if other is not None:
                logs.append(math.log(s.results[row].us / other))
        return math.exp(sum(logs) / len(logs)) if logs else None


def write(path: Path, run: AttentionRun) -> None:
    """The run as JSON, replaced whole or not at all. Raises BadInput."""
    outputs.write_json("--out", path, run)
