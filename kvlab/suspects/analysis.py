"""Which suspects can explain the gap between what a step should cost and what it does?"""

import math

import msgspec

from kvlab.errors import BadInput
from kvlab.suspects.bounds import SUSPECTS, Bound, Case, bounds, full_cast_ms

SLACK = 5.0
"""How many times its bound a part is granted where nobody measured it."""
THRESHOLD = 0.2
"""The share of the gap from which a suspect is worth looking at."""

RULED_OUT, LOOK, UNKNOWN = "ruled out", "worth looking at", "unknown"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds a step, and where from. `counts`: on a like card, so that it can raise what the
    part is granted; otherwise it only stands beside."""

    ms: float
    source: str
    counts: bool = True


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """One suspect. Milliseconds are a step's, of one rank.

    `most_ms` is what it is taken to cost at most, by the rule. `excess_ms` is that less the bound, `share`
    the excess over the gap, and `factor_to_matter` how many times its bound it would have to cost to be worth
    looking at. None where the step is not known.
    """

    name: str
    title: str
    bound_ms: float
    bound: Bound
    measured_ms: float | None
    measured_from: str | None
    elsewhere_ms: float | None
    elsewhere_from: str | None
    most_ms: float
    most_from: str
    excess_ms: float
    share: float | None
    factor_to_matter: float | None
    verdict: str


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The gap and who can explain it.

    `explained_ms` is the most that all suspects but the cast cost together; `unexplained_ms` what the step
    still has beyond that. `full_cast_ms` is a cast of the whole pool in every layer at the card's bandwidth.
    `after` has the verdicts once the cast is gone, against the gap that is left then; unknown where nobody
    measured the cast.
    """

    case: str
    model: str
    gpu: str
    tp: int
    batch: int
    context: int
    slots: int
    mlp: str
    other: str
    step_ms: float | None
    step_from: str | None
    floor_ms: float
    gap_ms: float | None
    explained_ms: float
    unexplained_ms: float | None
    full_cast_ms: float
    rule: str
    slack: float
    threshold: float
    suspects: list[Suspect]
    ruled_out: list[str]
    left_standing: list[str]
    after: dict[str, str]
    after_gap_ms: float | None
    assumptions: list[str]
    notes: list[str]

    def suspect(self, name: str) -> Suspect:
        """One of them by name."""
        for found in self.suspects:
            if found.name == name:
                return found
        raise BadInput(f"suspect: {name!r} is none of {', '.join(SUSPECTS)}")


def verdict(excess_ms: float, gap_ms: float | None, threshold: float) -> str:
    """Ruled out where the excess is under `threshold` of the gap; unknown without a gap."""
    if gap_ms is None:
        return UNKNOWN
    return RULED_OUT if excess_ms < threshold * gap_ms else LOOK


def rule(slack: float, threshold: float) -> str:
    """The verdict's rule in words."""
    return (
        f"ruled out: what it costs beyond its bound is under {threshold:.0%} of the gap; what it costs is "
        f"what was measured in this step; without that the largest of {slack:g} times its bound, as many "
        "times its bound as in the recorded H200 step, and what was measured or reported of it on such a card"
    )


def analyse(
    case: Case,
    *,
    step_ms: float | None = None,
    step_from: str | None = None,
    measured: dict[str, Measured] | None = None,
    elsewhere: dict[str, Measured] | None = None,
    factors: dict[str, float] | None = None,
    slack: float = SLACK,
    threshold: float = THRESHOLD,
    assumptions: list[str] | None = None,
    notes: list[str] | None = None,
) -> Analysis:
    """Bound, measurement and verdict of every suspect.

    `measured` was taken inside this very step; `elsewhere` on another host or of the part alone; `factors`
    are times over the bound seen in another step. Raises BadInput for a step that is shorter than its bounds.
    """
    if not 1 <= slack < math.inf:
        raise BadInput(f"--slack {slack:g}: a part cannot be faster than its bound; give 1 or more")
    if not 0 < threshold <= 1:
        raise BadInput(f"--threshold {threshold:g}: a share of the gap, above 0 and at most 1")
    measured, elsewhere = measured or {}, elsewhere or {}
    must = bounds(case)
    floor = sum(b.ms for b in must.values())
    if step_ms is not None and not floor < step_ms < math.inf:
        raise BadInput(
            f"--step-ms {step_ms:g}: not more than the {floor:.2f} ms that its parts must take; check model, "
            "card, formats and --tp"
        )
    gap = None if step_ms is None else step_ms - floor
    whole = full_cast_ms(case)
    found = []
    for name, bound in must.items():
        inside, other = measured.get(name), elsewhere.get(name)
        most, source = _most(
            name, bound, inside, other, times=max(slack, (factors or {}).get(name, slack)), whole=whole
        )
        if gap is not None and inside is None and most > bound.ms + gap:
            most, source = bound.ms + gap, f"{source}, cut to the gap"
        excess = max(most - bound.ms, 0.0)
        found.append(
            Suspect(
                name=name,
                title=SUSPECTS[name],
                bound_ms=bound.ms,
                bound=bound,
                measured_ms=inside.ms if inside else None,
                measured_from=inside.source if inside else None,
                elsewhere_ms=other.ms if other else None,
                elsewhere_from=other.source if other else None,
                most_ms=most,
                most_from=source,
                excess_ms=excess,
                share=excess / gap if gap else None,
                factor_to_matter=1 + threshold * gap / bound.ms if gap and bound.ms else None,
                verdict=verdict(excess, gap, threshold),
            )
        )
    explained = sum(s.most_ms for s in found if s.name != "cast")
    cast = next(s for s in found if s.name == "cast")
    after_gap = max(gap - cast.excess_ms, 0.0) if gap is not None and cast.measured_ms is not None else None
    return Analysis(
        case=case.name,
        model=case.geometry.name,
        gpu=case.gpu.key,
        tp=case.tp,
        batch=case.batch,
        context=case.context,
        slots=case.slots,
        mlp=case.mlp,
        other=case.other,
        step_ms=step_ms,
        step_from=step_from,
        floor_ms=floor,
        gap_ms=gap,
        explained_ms=explained,
        unexplained_ms=None if step_ms is None else max(step_ms - explained, 0.0),
        full_cast_ms=whole,
        rule=rule(slack, threshold),
        slack=slack,
        threshold=threshold,
        suspects=found,
        ruled_out=[s.name for s in found if s.verdict == RULED_OUT],
        left_standing=[s.name for s in found if s.verdict == LOOK],
        after={s.name: verdict(s.excess_ms, after_gap, threshold) for s in found if s.name != "cast"},
        after_gap_ms=after_gap,
        assumptions=assumptions or [],
        notes=notes or [],
    )


def _most(
    name: str, bound: Bound, inside: Measured | None, other: Measured | None, *, times: float, whole: float
) -> tuple[float, str]:
    if inside is not None:
        return inside.ms, inside.source
    if name == "cast":
        return times * whole, f"{times:g} times a cast of the whole pool at the card's bandwidth"
    granted = times * max(bound.ms, bound.expected_ms)
    if other is not None and other.counts and other.ms > granted:
        return other.ms, other.source
    return granted, f"{times:.3g} times {'the bound' if bound.ms else 'what the recorded H200 step took'}"
