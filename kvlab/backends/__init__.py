"""Who else could serve a model with multi-head latent attention, and why not.

`answer(model, gpu, sglang)` applies each release's own checks, kept as data in `rules/` and tested against
the source.
"""

from typing import Any

from kvlab.backends.decision import Question, Verdict, decide, decided_by, question
from kvlab.backends.rules import Evidence, releases

__all__ = [
    "Evidence",
    "Question",
    "Verdict",
    "answer",
    "answer_of",
    "decide",
    "decided_by",
    "question",
    "releases",
]


def answer(model: str, gpu: str, sglang: str, **more: Any) -> dict[str, Any]:
    """What `kvlab backends --json` prints. Keywords as in `question`. Raises BadInput."""
    return answer_of(question(model, gpu, sglang, **more))


def answer_of(q: Question) -> dict[str, Any]:
    """`{model, gpu, …, default, backends: [Verdict …], advice: [Option …]}` as plain data."""
    import msgspec

    from kvlab.backends import cost
    from kvlab.backends.advice import advise

    verdicts = decide(q)
    return {
        "model": q.geometry.name,
        "gpu": q.gpu.key,
        "compute_capability": q.gpu.sm,
        "sglang": q.sglang,
        "flashinfer": q.flashinfer,
        "kv_dtype": q.kv_dtype,
        "tp": q.tp,
        "heads": q.heads,
        "page_size": q.page_size,
        "decided_by": decided_by(q),
        "recorded_cast": cost.cast(),
        "default": next((v.backend for v in verdicts if v.default), None),
        "backends": [_plain(v) for v in verdicts],
        "advice": msgspec.to_builtins(advise(q, verdicts)),
    }


def _plain(v: Verdict) -> dict[str, Any]:
    import msgspec

    plain = msgspec.to_builtins(v)
    plain["evidence"] = [{**e, "text": str(o)} for e, o in zip(plain["evidence"], v.evidence, strict=True)]
    return plain
