"""For people who cannot patch: which flags avoid the cast on their release and card, and what each costs."""

from __future__ import annotations

import msgspec

from kvlab.backends import rules
from kvlab.backends.decision import Question, Verdict, decide
from kvlab.errors import BadInput


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way out: flags to pass, and what it costs in accuracy, memory and time."""

    what: str
    flags: list[str]
    accuracy: str
    memory: str
    time: str


def advise(q: Question, verdicts: list[Verdict] | None = None) -> list[Option]:
    """Ways to serve without the full-pool cast, the least costly in accuracy first."""
    verdicts = decide(q) if verdicts is None else verdicts
    found = [
        _backend(q, v)
        for v in sorted(filter(_avoids, verdicts), key=lambda v: (v.attends != "sparse", bool(v.rounds_q)))
    ]
    casts = [v for v in verdicts if v.works and v.casts_pool and v.attends == "dense"]
    casting = next((v for v in casts if v.default), casts[0] if casts else None)
    if q.fp8 and casting:
        found += [_bf16(q, casting), _smaller_pool(q, casting)]
    if upgrade := _upgrade(q, verdicts):
        found.append(upgrade)
    return found


def _avoids(v: Verdict) -> bool:
    return (
        v.works is True
        and not v.casts_pool
        and not v.backend.endswith((".flashmla_auto",))
        and "." not in v.backend
    )


def _backend(q: Question, v: Verdict) -> Option:
    time = "not recorded beside the others"
    if v.cost:
        rows = v.cost["shapes"]
        slow, fast = max(rows, key=_ratio), min(rows, key=_ratio)
        if _ratio(fast):
            time = (
                f"attention {_ratio(fast):.1f} to {_ratio(slow):.1f} times the BF16 control's "
                f"({v.cost['gpu']}, {v.cost['source']})"
            )
    if "extend" in v.casts:
        time += "; paged prefill still casts the whole pool"
    memory = f"{v.row_bytes} bytes a token and layer, as now"
    if v.row_bytes and v.row_bytes != q.geometry.latent_dim:
        memory = f"{v.row_bytes} bytes a token and layer instead of {q.geometry.latent_dim}"
    return Option(
        what=f"{v.backend} reads FP8 rows itself",
        flags=v.flags,
        accuracy=v.accuracy,
        memory=memory,
        time=time,
    )


def _ratio(row: dict) -> float:
    return row["us"] / row["control_us"] if row.get("control_us") else 0.0


def _bf16(q: Question, v: Verdict) -> Option:
    flags = [
        f
        for f in v.flags
        if not f.startswith("--kv-cache-dtype") and "fill-backend" not in f and "decode-b" not in f
    ]
    return Option(
        what=f"a BF16 cache with {v.backend}: there is nothing left to cast",
        flags=[*flags, "--kv-cache-dtype bfloat16"],
        accuracy="better: nothing is rounded to FP8",
        memory=f"{2 * q.geometry.latent_dim} bytes a token and layer instead of "
        f"{q.geometry.latent_dim}: half the tokens fit",
        time="the control of the benchmarks: the cast's time is gone",
    )


def _smaller_pool(q: Question, v: Verdict) -> Option:
    return Option(
        what="a smaller pool: the cast's time is proportional to its slots, not to the tokens in use",
        flags=[*v.flags, "--max-total-tokens N"],
        accuracy="unchanged",
        memory="less: N tokens of all requests together, radix cache included",
        time="the cast shrinks with N",
    )


def _upgrade(q: Question, verdicts: list[Verdict]) -> Option | None:
    """The first later release whose own default on this card avoids the cast, where this one's does not."""
    if any(v.default and _avoids(v) for v in verdicts):
        return None
    known = (r for r in rules.releases() if rules.version_key(r) > rules.version_key(q.sglang))
    for release in known:
        pinned = rules.load("sglang", release)["pins"]["flashinfer-python"]
        later = msgspec.structs.replace(q, sglang=release, flashinfer=pinned)
        try:
            best = next((v for v in decide(later) if v.default and _avoids(v)), None)
        except BadInput:
            continue
        if best:
            return Option(
                what=f"SGLang {release}: its default on this card is {best.backend}, which does not cast",
                flags=[f"sglang=={release}", *best.flags],
                accuracy=best.accuracy,
                memory=f"{best.row_bytes} bytes a token and layer",
                time="not recorded beside the others" if best.cost is None else "see its recorded cost",
            )
    return None
