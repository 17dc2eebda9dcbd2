"""Who could serve: every MLA backend's verdict on a question."""

from __future__ import annotations

import msgspec

from kvlab.backends import checks, cost, dense, served, sparse
from kvlab.backends.case import Case, Question, Verdict, question

__all__ = ["Question", "Verdict", "decide", "decided_by", "question"]


def decide(q: Question) -> list[Verdict]:
    """Every MLA backend that the release has or has had, in a fixed order; the default one is marked."""
    case = Case(q)
    found = [dense.verdict(case, name) for name in checks.BY_BACKEND]
    found += sparse.verdicts(case)
    found += [dense.elsewhere(case, name) for name in dense.OTHER_HARDWARE if name in case.s["registered"]]
    return [_with_records(v, q) for v in found]


def _with_records(v: Verdict, q: Question) -> Verdict:
    tried = served.of(v.backend, sglang=q.sglang, gpu=q.gpu.name, kv_dtype=q.kv_dtype)
    return msgspec.structs.replace(v, cost=cost.of(v.backend, q) if v.works else None, served=tried)


def decided_by(q: Question) -> dict[str, str]:
    """Where the answers come from: the installed release's source, or the committed rules."""
    case = Case(q)
    return {
        f"{r.package} {r.release}": r.origin for r in dict.fromkeys((case.s, case.f, case.k, case.m, case.t))
    }
