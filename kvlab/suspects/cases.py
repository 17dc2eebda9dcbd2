"""Which step is under suspicion? The source text's, the recorded H200 rank's, or one of the caller's."""

import functools
import math
from pathlib import Path

import msgspec

from kvlab import data, dummy, gpus, models
from kvlab.errors import BadInput
from kvlab.suspects.analysis import SLACK, THRESHOLD, Analysis, Measured, analyse
from kvlab.suspects.bounds import SUSPECTS, Case, all_reduces, bounds, message_bytes, peak
from kvlab.suspects.recorded import Step, h200_step, h200_trace, host_ms, newest_run, reported_us, traced
from kvlab.suspects.results import LiveRun, reduce_us, step_ms
from kvlab.weights import FORMATS

# NCCL's own cost model for a ring with its low-latency protocol (src/graph/tuning.cc): microseconds for the
# call, and for one hop by kind of link.
NCCL_BASE_US = 3.6
NCCL_HOP_US = {"NVLink": 0.47, "PCIe": 1.0}
NCCL_SOURCE = "NCCL, src/graph/tuning.cc: ring, LL protocol"

MODEL, GPU, TP, BATCH, CONTEXT, SLOTS = "glm-5", "rtx-pro-6000", 8, 1, 100, 495_552
MLP, OTHER = "nvfp4", "bf16"
_ELSEWHERE = "recorded on one H200 rank, BF16 weights"


def case(
    *,
    model: str = MODEL,
    gpu: str = GPU,
    tp: int = TP,
    batch: int = BATCH,
    context: int = CONTEXT,
    slots: int = SLOTS,
    mlp: str = MLP,
    other: str = OTHER,
    kv_dtype: str = "fp8",
    cuda_graphs: bool = True,
    bandwidth: float | None = None,
    algorithm: str = "ring",
    link_bandwidth: float | None = None,
    link_hop_us: float | None = None,
    step: Step | None = None,
) -> tuple[Case, list[str]]:
    """A case and what is assumed in it. Bandwidths are bytes a second, None the sheet's.

    `step` gives launches and the shortest kernel; the recorded H200 step by default. Raises BadInput.
    """
    for name, value in (("--batch", batch), ("--context", context), ("--slots", slots), ("--tp", tp)):
        if value < 1:
            raise BadInput(f"{name} {value}: give 1 or more")
    for name, value, known in (
        ("--weights-dtype", mlp, tuple(FORMATS)),
        ("--attention-dtype", other, tuple(FORMATS)),
        ("--kv-dtype", kv_dtype, ("fp8", "bf16")),
        ("--all-reduce", algorithm, ("ring", "one-shot")),
    ):
        if value not in known:
            raise BadInput(f"{name} {value!r}: one of {', '.join(known)}")
    for name, value in (("--bandwidth", bandwidth), ("--link-bandwidth", link_bandwidth)):
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"{name}: give more than 0")
    if link_hop_us is not None and not 0 <= link_hop_us < math.inf:
        raise BadInput("--link-latency: give 0 or more")
    if batch * context > slots:
        raise BadInput(f"--slots {slots}: {batch} requests of {context} tokens need {batch * context}")
    geometry = models.load(model)
    card = gpus.lookup(gpu)
    if bandwidth is None and card.bandwidth is None:
        raise BadInput(f"--bandwidth: the sheet has none for {card.name}; give TB/s")
    speed = bandwidth or float(card.bandwidth or 0)
    step = step or h200_step()
    scale = geometry.attention_layers / step.layers
    assumed = [
        f"memory bandwidth {speed / 1e12:.3f} TB/s ({'given' if bandwidth else 'data sheet'}), all reached",
        f"{mlp} experts, shared experts and dense MLPs; {other} attention, router and head",
        f"launches as in {step.source}, by layers; no kernel under {step.kernel_us:.2f} us, its shortest",
        "a token's experts spread evenly; ranks share every expert, and none waits for another",
    ]
    link, hop = 0.0, 0.0
    if tp > 1:
        if link_bandwidth is None and card.link_bandwidth is None:
            raise BadInput(f"--link-bandwidth: the sheet has none for {card.name}; give GB/s a direction")
        link = link_bandwidth or float(card.link_bandwidth or 0)
        kind = (card.link or "PCIe").split()[0]
        hop = NCCL_HOP_US.get(kind, NCCL_HOP_US["PCIe"]) if link_hop_us is None else link_hop_us
        assumed += [
            f"link {link / 1e9:g} GB/s a direction ({'given' if link_bandwidth else f'peak of {card.link}'})",
            f"all-reduce {algorithm}: {NCCL_BASE_US:g} us a call and {hop:g} us a hop "
            f"({NCCL_SOURCE if link_hop_us is None else 'hop given'})",
        ]
    if cuda_graphs:
        assumed.append("CUDA graphs: the step does not wait for its host")
    else:
        assumed.append("no CUDA graphs: the host costs what it costs the recorded H200 step without them")
    if mlp not in card.tensor and card.tensor:
        assumed.append(f"{card.name} has no {mlp} tensor cores: products count as BF16, bytes as {mlp}")
    found = Case(
        name=f"{geometry.name}, {card.key}, TP {tp}",
        geometry=geometry,
        gpu=card,
        tp=tp,
        batch=batch,
        context=context,
        slots=slots,
        mlp=mlp,
        other=other,
        bandwidth=speed,
        launches={name: n * scale for name, n in step.launches.items()},
        kernel_us=step.kernel_us,
        gap_us=step.gap_us,
        row_bytes=geometry.latent_dim * (1 if kv_dtype == "fp8" else 2),
        casts=kv_dtype == "fp8",
        host_ms=0.0 if cuda_graphs else host_ms(),
        algorithm=algorithm,
        link_bandwidth=link,
        link_base_us=NCCL_BASE_US,
        link_hop_us=hop,
    )
    return found, assumed


def is_source_text(one: Case) -> bool:
    """Whether this is the step that the source text reports."""
    return (one.geometry.name, one.gpu.key, one.tp, one.batch, one.slots, one.casts) == (
        MODEL,
        GPU,
        TP,
        BATCH,
        SLOTS,
        True,
    )


@functools.cache
def claims() -> dict[str, float]:
    """The source text's figures by claim; empty where no YAML reader is installed."""
    try:
        import yaml
    except ModuleNotFoundError:
        return {}
    entries = yaml.safe_load(data.reported("claims.yml").read_text("utf-8"))["claims"]
    return {c["id"]: float(c["value"]) for c in entries if "value" in c}


def elsewhere(one: Case) -> dict[str, Measured]:
    """What was measured of this case's suspects on other hosts, or of the part alone on such a card.

    All-reduces that others report for this card count, and microbenchmarks recorded on it; the recorded H200
    step stands beside.
    """
    found = {}
    if one.geometry.name == MODEL and one.batch == 1:
        found = {
            name: Measured(ms=share.ms, source=_ELSEWHERE, counts=False)
            for name, share in h200_step().shares.items()
        }
    newest = newest_run()
    if newest is not None and newest[1].model == one.geometry.name and newest[1].tp == one.tp:
        found |= alone(one, newest[1], newest[0])
    if one.tp > 1 and "communication" not in found:
        public = reported_us(one.gpu.key, one.tp, message_bytes(one))
        if public is not None:
            us, said = public
            found["communication"] = Measured(
                ms=all_reduces(one) * us / 1e3, source=f"reported by {said.source}, NCCL: {said.on_like}"
            )
    return found


def alone(one: Case, run: LiveRun, name: str) -> dict[str, Measured]:
    """A run's microbenchmarks as a step of this case; they count where the run's card is the case's."""
    same = gpus.lookup(run.device).key == one.gpu.key if run.device != "cpu" else False
    source = f"alone on {run.device}, {name}"
    found = {}
    for suspect in SUSPECTS:
        fmt = one.mlp if suspect == "experts" else one.other
        ms = step_ms(run, suspect, batch=one.batch, fmt=fmt)
        if ms is not None:
            found[suspect] = Measured(ms=ms, source=source, counts=same)
    us = reduce_us(run, one.tp, message_bytes(one))
    if us is not None:
        found["communication"] = Measured(ms=all_reduces(one) * us / 1e3, source=source, counts=same)
    return found


@functools.cache
def recorded_factors() -> dict[str, float]:
    """How many times its bound each suspect took in the recorded H200 step, the cast left out."""
    found = recorded_rank().suspects
    return {
        s.name: s.measured_ms / s.bound_ms for s in found if s.measured_ms and s.bound_ms and s.name != "cast"
    }


def _factors(one: Case) -> dict[str, float]:
    """The recorded factors of the suspects that the same thing binds here; bytes are no chain of launches."""
    rank, here = recorded_rank(), bounds(one)
    return {n: f for n, f in recorded_factors().items() if rank.suspect(n).bound.by == here[n].by}


def source_text(
    *,
    step_ms: float | None = None,
    cast_ms: float | None = None,
    trace: Path | None = None,
    slack: float = SLACK,
    threshold: float = THRESHOLD,
) -> Analysis:
    """The step that the source text reports: GLM-5-NVFP4, TP 8, eight RTX PRO 6000.

    `step_ms` and `cast_ms` are the text's by default, `trace` (for launches) the recorded H200 step's.
    """
    one, assumed = case(step=traced(trace) if trace else None)
    return analyse_case(one, assumed, step_ms=step_ms, cast_ms=cast_ms, slack=slack, threshold=threshold)


def analyse_case(
    one: Case,
    assumed: list[str],
    *,
    step_ms: float | None = None,
    cast_ms: float | None = None,
    step: Step | None = None,
    slack: float = SLACK,
    threshold: float = THRESHOLD,
) -> Analysis:
    """An analysis with all that is known of the case: `step` traces this very step, `step_ms` is its time."""
    measured: dict[str, Measured] = {}
    said = "given" if step_ms is not None else None
    if cast_ms is not None:
        measured = {"cast": Measured(ms=cast_ms, source="given")}
    if step is not None:
        measured = {n: Measured(ms=s.ms, source=step.source) for n, s in step.shares.items()}
        step_ms, said = (step.ms, step.source) if step_ms is None else (step_ms, said)
    elif is_source_text(one) and step_ms is None and claims():
        step_ms, said = claims()["step_ms"], "reported by the source text"
        measured = {"cast": Measured(ms=claims()["cast_ms"], source="reported by the source text")}
    notes = _notes(one, step_ms)
    return analyse(
        one,
        step_ms=step_ms,
        step_from=said,
        measured=measured,
        elsewhere=elsewhere(one) if step is None else {},
        factors=_factors(one) if step is None else None,
        slack=slack,
        threshold=threshold,
        assumptions=assumed,
        notes=notes,
    )


def recorded_rank(
    *, trace: Path | None = None, slack: float = SLACK, threshold: float = THRESHOLD
) -> Analysis:
    """The recorded H200 step: one rank of GLM-5 at TP 8, alone, with 32 of its experts and BF16 weights.

    `trace` is another trace of such a rank.
    """
    step = traced(trace or h200_trace())
    config = dummy.rank_config(models.load(MODEL), tp=TP, experts=32)
    shape = models.from_config(config, name=str(config["kvlab_rank_of"]))
    one, assumed = case(tp=1, gpu="h200", mlp="bf16", other="bf16", step=step)
    slots = step.pool_slots or SLOTS
    one = msgspec.structs.replace(one, name=f"{shape.name}, h200", geometry=shape, slots=slots)
    found = analyse_case(one, assumed, step=step, slack=slack, threshold=threshold)
    all_ranks, _ = case(gpu="h200", mlp="bf16", other="bf16", step=step)
    would = bounds(all_ranks)["communication"]
    seen = _all_reduces_elsewhere(all_ranks)
    note = (
        f"One rank alone: this step has no all-reduce. At TP {TP} over {all_ranks.gpu.link} it would have "
        f"{would.launches:g}, {would.ms:.2f} ms at least"
    )
    if seen is not None:
        note += f"; {seen.ms:.2f} ms {seen.source}"
    suspects = [
        msgspec.structs.replace(s, elsewhere_ms=seen.ms, elsewhere_from=seen.source)
        if s.name == "communication" and seen is not None
        else s
        for s in found.suspects
    ]
    return msgspec.structs.replace(found, suspects=suspects, notes=[*found.notes, note + "."])


def _all_reduces_elsewhere(one: Case) -> Measured | None:
    """A step's all-reduces measured on such a card, by the most ranks that ran; else as others report."""
    count, size = all_reduces(one), message_bytes(one)
    newest = newest_run()
    if newest is not None:
        name, run = newest
        ranks = [r.ranks for r in run.reduces if r.bytes == size and r.correct and r.ranks > 1]
        us = reduce_us(run, max(ranks), size) if ranks else None
        if us is not None:
            said = f"for {count} all-reduces of {max(ranks)} ranks, alone on {run.device}, {name}"
            return Measured(ms=count * us / 1e3, source=said, counts=False)
    public = reported_us("h100", one.tp, size)
    if public is None:
        return None
    us, said = public
    return Measured(
        ms=count * us / 1e3,
        source=f"for as many reported by {said.source}, NCCL on eight H100",
        counts=False,
    )


def _notes(one: Case, step_ms: float | None) -> list[str]:
    notes = []
    if step_ms is None:
        notes.append("Verdicts need the step's time: --step-ms, or --trace with a trace of it.")
    if one.mlp == "nvfp4" and one.gpu.compute_capability and one.gpu.compute_capability < (10, 0):
        notes.append(
            f"FP4 GEMM cannot run on {one.gpu.name}: no FP4 tensor cores before SM100. Its bound here is the "
            "bytes it would read; nothing measures it."
        )
    if peak(one, "experts") is None:
        notes.append(f"The sheet has no tensor-core peak for {one.gpu.name}: bounds count bytes only.")
    if one.tp > 1 and one.algorithm == "ring":
        notes.append("All-reduces are counted as not hidden behind other work.")
    return notes
