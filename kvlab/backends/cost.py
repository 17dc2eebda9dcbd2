"""What a backend costs beside the others, where a recorded run has measured it; nothing is estimated."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from kvlab import data

if TYPE_CHECKING:
    from kvlab.backends.decision import Question

# The benchmark's names (`bench attention`) for what a backend does with an FP8 cache.
_MEASURED_AS = {"flashinfer": "stock", "fa3": "stock", "triton": "sglang_triton", "flashmla": "flashmla_fp8"}
_CONTROL = "control_bf16"


@cache
def _runs() -> list[tuple[str, dict[str, Any]]]:
    """Recorded attention runs, newest first, with the folder's name."""
    found = []
    for path in sorted(data.recorded().glob("*/*.json")):
        try:
            document = msgspec.json.decode(path.read_bytes())
        except msgspec.DecodeError:
            continue
        if isinstance(document, dict) and "provenance" in document and _shapes(document):
            found.append((f"data/recorded/{path.parent.name}/{path.name}", document))
    return sorted(found, key=lambda run: run[1]["provenance"].get("date", ""), reverse=True)


def _shapes(document: dict[str, Any]) -> list[dict[str, Any]]:
    shapes = document.get("shapes")
    return [s for s in shapes if isinstance(s, dict) and "results" in s] if isinstance(shapes, list) else []


def of(backend: str, q: Question) -> dict[str, Any] | None:
    """One layer's decode attention in microseconds by shape, with the error against float32 and the BF16
    control.

    `{source, gpu, shapes: [{batch, context, heads, us, error, control_us}]}` from the newest run that
    measured the backend, or None: not recorded. A run on another card is given with that card's name.
    """
    name = _MEASURED_AS.get(backend)
    if name is None or not q.fp8:
        return None
    best = None
    for source, document in _runs():
        rows = [
            _row(s, name) for s in _shapes(document) if (s["results"].get(name) or {}).get("us") is not None
        ]
        if not rows:
            continue
        cards = document["provenance"].get("gpus") or ["unknown"]
        answer = {"source": source, "gpu": cards[0], "measured_as": name, "shapes": rows}
        if q.gpu.name.split()[-1] in cards[0]:
            return answer
        best = best or answer
    return best


@cache
def cast() -> dict[str, Any] | None:
    """One layer's full-pool cast as recorded, `{source, gpu, us, bytes}`: what casting adds, layer by layer.

    `bytes` is what it read and wrote; the time is proportional to the pool.
    """
    for path in sorted(data.recorded().glob("*/kernels.json")):
        document = msgspec.json.decode(path.read_bytes())
        for row in document.get("rows", []):
            if row.get("what") == "cast full pool":
                moved = round(row["us"] * row["TBs"] * 1e6)
                source = f"data/recorded/{path.parent.name}/{path.name}"
                return {"source": source, "gpu": document["gpu"], "us": row["us"], "bytes": moved}
    return None


def _row(shape: dict[str, Any], name: str) -> dict[str, Any]:
    result, control = shape["results"][name], shape["results"].get(_CONTROL) or {}
    return {
        "batch": shape["batch"],
        "context": shape["context"],
        "heads": shape["heads"],
        "us": result["us"],
        "error": result.get("error"),
        "control_us": control.get("us"),
    }
