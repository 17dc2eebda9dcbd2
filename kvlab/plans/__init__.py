"""What does a plan freeze, and what may change behind it? Released SGLang and flashinfer code, run on a CPU.

`python -m kvlab.plans` prints what came out; `--record FILE` keeps it with its provenance, for machines
that have neither package.
"""

from __future__ import annotations

import msgspec

from kvlab.backends import sources
from kvlab.plans.results import Frozen, Observed, Release

SGLANG, FLASHINFER = "0.5.9", "0.6.3"


def observe(releases: list[Release] | None = None) -> Observed:
    """Run it all. Takes the sources from where they are installed or cached, else downloads them.

    `releases`: what is known of all releases; read from those at hand where not given.
    """
    from kvlab import inspection
    from kvlab.plans import experiments

    sglang, flashinfer = sources.fetch("sglang", SGLANG), sources.fetch("flashinfer-python", FLASHINFER)
    wrapper = inspection.wrapper(FLASHINFER)
    plan, run = wrapper.method("plan"), wrapper.method("run")
    buffers, readings = experiments.stale(sglang, flashinfer)
    return Observed(
        sglang=SGLANG,
        flashinfer=FLASHINFER,
        file=run.file,
        plan_line=plan.line,
        run_line=run.line,
        frozen=[Frozen(kept=k, is_read=k.name in run.uses) for k in plan.keeps],
        releases=_releases() if releases is None else releases,
        buffers=buffers,
        readings=readings,
        variants=experiments.variants(sglang, flashinfer),
        shared=experiments.shared(sglang, flashinfer),
        careless=experiments.careless(sglang, flashinfer),
        decorated=experiments.decorated(flashinfer),
    )


def _releases() -> list[Release]:
    from kvlab import inspection
    from kvlab.backends import rules

    found = []
    for release in rules.releases("flashinfer-python"):
        if sources.at_hand("flashinfer-python", release) is None:
            continue
        read = inspection.wrapper(release)
        found.append(
            Release(
                release=release,
                reads=[k.name for k in read.frozen()],
                host_copies=read.method("plan").source.count('.to("cpu")'),
                checks=len(read.method("plan").checks),
                decorators=read.method("run").decorators,
            )
        )
    return found


def recorded() -> Observed:
    """As it came out on the machine that recorded it."""
    from kvlab import data

    path = data.recorded("plan-and-run") / "observed.json"
    return msgspec.convert(msgspec.json.decode(path.read_bytes())["observed"], Observed)


def shown() -> tuple[str, Observed]:
    """For a page: run here where both packages' sources are at hand, else as recorded. Downloads nothing."""
    wanted = (("sglang", SGLANG), ("flashinfer-python", FLASHINFER))
    if all(sources.at_hand(package, release) for package, release in wanted):
        return "run here", observe(recorded().releases)
    return "data/recorded/plan-and-run/observed.json", recorded()
