"""What changed between two traces, per decode step: by class, by kernel, what appeared and what vanished."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvlab.errors import BadInput
from kvlab.trace.classes import ORDER
from kvlab.trace.report import Report, slowest, spread


class Change(msgspec.Struct, kw_only=True, frozen=True):
    """Milliseconds per step, launches per step, and the share of the GPU's busy time, before and after."""

    before_ms: float
    after_ms: float
    delta_ms: float
    before_share: float
    after_share: float
    before_launches: float
    after_launches: float


class KernelChange(msgspec.Struct, kw_only=True, frozen=True):
    """One kernel name: it appeared where it had no launch before, vanished where it has none after."""

    name: str
    short: str
    category: str
    before_ms: float
    after_ms: float
    delta_ms: float
    before_launches: float
    after_launches: float


class RankChange(msgspec.Struct, kw_only=True, frozen=True):
    """One rank's step and its full-pool casts, milliseconds; None on the side that has no such rank."""

    rank: str
    before_ms: float | None
    after_ms: float | None
    before_cast_ms: float | None
    after_cast_ms: float | None


class Diff(msgspec.Struct, kw_only=True, frozen=True):
    """Two reports compared."""

    before: str
    after: str
    before_rank: str
    after_rank: str
    before_step_ms: float
    after_step_ms: float
    delta_ms: float
    speedup: float
    before_idle_ms: float
    """Step time in which no stream works; of the GPU's time as step_ms counts it, so never negative."""
    after_idle_ms: float
    before_overlap_ms: float
    """Time counted in several streams at once: what the classes' sum is over the time at least one works."""
    after_overlap_ms: float
    categories: dict[str, Change]
    kernels: list[KernelChange]
    """By the size of the change."""
    appeared: list[str]
    vanished: list[str]
    kv_cast_gone: bool | None
    """The full-pool cast was there before and is not after; None where it was not there before."""
    notes: list[str]
    ranks: list[RankChange] = []
    """Every rank, where a side has several; all else is of the slowest of each side."""
    before_spread: float | None = None
    """(slowest - fastest) / fastest step of the ranks, None for one."""
    after_spread: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain types, as `--json` prints them."""
        return msgspec.to_builtins(self)


def diff(before: Report, after: Report) -> Diff:
    """Compare two reports. Raises BadInput where one has no decode step to compare."""
    for r in (before, after):
        if not r.steps or not r.step_ms:
            raise BadInput(
                f"{r.file}: no decode step to compare; record both traces while the server decodes"
            )
    kernels = _kernels(before, after)
    b, a = before.step_ms or 0.0, after.step_ms or 0.0
    return Diff(
        before=before.file,
        after=after.file,
        before_rank=before.rank,
        after_rank=after.rank,
        before_step_ms=b,
        after_step_ms=a,
        delta_ms=a - b,
        speedup=b / a,
        before_idle_ms=max(b - (before.active_ms or 0.0), 0.0),
        after_idle_ms=max(a - (after.active_ms or 0.0), 0.0),
        before_overlap_ms=_overlap(before),
        after_overlap_ms=_overlap(after),
        categories=_categories(before, after),
        kernels=kernels,
        appeared=[k.name for k in kernels if not k.before_launches],
        vanished=[k.name for k in kernels if not k.after_launches],
        kv_cast_gone=None if before.kv_cast is None else after.kv_cast is None,
        notes=_notes(before, after),
    )


def diff_ranks(before: Sequence[Report], after: Sequence[Report]) -> Diff:
    """Compare two runs of one or several ranks: the slowest of each side, and every rank by its name.

    Raises BadInput where the slowest of a side has no decode step, or a side has two traces of a rank.
    """
    for side in (before, after):
        for rank, count in Counter(r.rank for r in side).items():
            if count > 1:
                files = ", ".join(Path(r.file).name for r in side if r.rank == rank)
                raise BadInput(
                    f"{Path(side[0].file).parent}: {count} traces of {rank} ({files}), so they are not the "
                    f"ranks of one run; name one trace on each side"
                )
    change = diff(slowest(before), slowest(after))
    if len(before) == len(after) == 1:
        return change
    old, new = ({r.rank: r for r in side} for side in (before, after))
    notes = list(change.notes)
    if old.keys() != new.keys():
        notes.append(f"the ranks differ: {', '.join(old)} before, {', '.join(new)} after")
    return msgspec.structs.replace(
        change,
        notes=notes,
        ranks=[
            RankChange(
                rank=name,
                before_ms=old[name].step_ms if name in old else None,
                after_ms=new[name].step_ms if name in new else None,
                before_cast_ms=_cast_ms(old.get(name)),
                after_cast_ms=_cast_ms(new.get(name)),
            )
            for name in dict.fromkeys([*old, *new])
        ],
        before_spread=spread(before),
        after_spread=spread(after),
    )


def _cast_ms(r: Report | None) -> float | None:
    if r is None:
        return None
    return r.kv_cast.ms_per_step if r.kv_cast else 0.0


def _overlap(r: Report) -> float:
    return sum(c.ms_per_step for c in r.categories.values()) - (r.active_ms or 0.0)


def _categories(before: Report, after: Report) -> dict[str, Change]:
    made = {}
    for cls in ORDER:
        b, a = before.categories.get(cls), after.categories.get(cls)
        if b or a:
            made[cls] = Change(
                before_ms=b.ms_per_step if b else 0.0,
                after_ms=a.ms_per_step if a else 0.0,
                delta_ms=(a.ms_per_step if a else 0.0) - (b.ms_per_step if b else 0.0),
                before_share=b.share if b else 0.0,
                after_share=a.share if a else 0.0,
                before_launches=b.launches if b else 0.0,
                after_launches=a.launches if a else 0.0,
            )
    return dict(sorted(made.items(), key=lambda item: item[1].delta_ms))


def _kernels(before: Report, after: Report) -> list[KernelChange]:
    b = {k.name: k for k in before.kernels}
    a = {k.name: k for k in after.kernels}
    made = []
    for name in b.keys() | a.keys():
        old, new = b.get(name), a.get(name)
        some = new or old
        assert some
        old_ms, new_ms = old.ms_per_step if old else 0.0, new.ms_per_step if new else 0.0
        made.append(
            KernelChange(
                name=name,
                short=some.short,
                category=some.category,
                before_ms=old_ms,
                after_ms=new_ms,
                delta_ms=new_ms - old_ms,
                before_launches=old.launches if old else 0.0,
                after_launches=new.launches if new else 0.0,
            )
        )
    return sorted(made, key=lambda k: (-abs(k.delta_ms), k.name))


def _notes(before: Report, after: Report) -> list[str]:
    notes = []
    for what in ("device", "layers", "batch", "cuda_graphs", "backend"):
        b, a = getattr(before, what), getattr(after, what)
        if b != a:
            notes.append(f"the traces differ in {what.replace('_', ' ')}: {b} before, {a} after")
    waits = [word for word, r in (("before", before), ("after", after)) if _waits_for_host(r)]
    if waits:
        notes.append(
            f"{' and '.join(waits)}, the step waits for its host, which the profiler slows: compare the "
            f"GPU's busy time, {before.busy_ms:.2f} ms before and {after.busy_ms:.2f} after"
        )
    return notes


def _waits_for_host(r: Report) -> bool:
    return not r.cuda_graphs and (r.step_ms or 0.0) > 2 * (r.active_ms or 0.0)
