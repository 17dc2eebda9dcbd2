"""A dense backend's verdict: what refuses it, or how it serves."""

from __future__ import annotations

from typing import Any

from kvlab.backends import checks
from kvlab.backends.case import Case, Verdict
from kvlab.backends.rules import Evidence

OTHER_HARDWARE = {
    "aiter": "AMD GPUs",
    "wave": "AMD GPUs",
    "ascend": "Huawei Ascend NPUs",
    "intel_amx": "Intel CPUs with AMX",
    "intel_xpu": "Intel GPUs",
}


def verdict(case: Case, name: str) -> Verdict:
    """The verdict of one dense backend."""
    q, s = case.q, case.s
    findings = [*checks.model_known(case), *checks.registered(case, name)]
    if not any(f.refuses for f in findings):
        findings += [*checks.dsa_rows(case, name), *checks.page(case, name), *checks.BY_BACKEND[name](case)]
    refused = [f for f in findings if f.refuses]
    casts = s["casts"].get(name, {}) if q.fp8 else {}
    if q.fp8 and not casts and (s["inherits"].get(name) or "").startswith(("FlashInferMLA", "TRTLLMMLA")):
        # Its paged prefill is the flashinfer class's.
        casts = {"extend": s["casts"]["flashinfer"]["extend"]}
    evidence = [e for f in refused for e in f.evidence]
    if not refused:
        evidence += [s.evidence(c, "code") for c in casts.values()]
        evidence += [e for f in findings for e in f.evidence]
        evidence += _served_evidence(case, name)
    rounded = s["rounds_q"].get(name)
    rounds = bool(rounded) if q.fp8 else False
    if rounds and not refused:
        evidence.append(s.evidence(rounded, "code"))
    works: bool | None = not refused
    page = checks.page_size(case, name)
    return Verdict(
        backend=name,
        works=works,
        reason=refused[0].text if refused else _served(case, name, casts),
        refusals=[f.text for f in refused],
        evidence=evidence,
        versions=case.versions,
        default=_is_default(case, name),
        casts_pool="decode" in casts,
        casts=sorted(casts),
        rounds_q=rounds,
        accuracy=_accuracy(case, name, rounds),
        page_sizes=checks.page_sizes(case, name),
        page_size=None if refused else page,
        heads=_heads(case, name),
        row_bytes=q.geometry.latent_dim * (1 if q.fp8 else 2),
        flags=[] if refused else _flags(case, name),
        notes=[f.text for f in findings if not f.refuses],
    )


def _served(case: Case, name: str, casts: dict[str, Any]) -> str:
    if not case.q.fp8:
        return "nothing in the release refuses it, and a BF16 cache needs no cast"
    if "decode" in casts:
        return "nothing in the release refuses it, and it casts the whole pool of every layer in every step"
    if casts:
        return (
            "nothing in the release refuses it; decode reads the FP8 rows, paged prefill casts the whole pool"
        )
    return "nothing in the release refuses it, and it reads the FP8 rows itself: no cast"


def _served_evidence(case: Case, name: str) -> list[Evidence]:
    """For what works: where it is registered, and what its checks admit."""
    s, f, m = case.s, case.f, case.m
    found = [s.evidence(s["registered"][name], "code")]
    if rule := s["constraints"].get(name, {}).get("page"):
        found.append(s.evidence(rule, "code"))
    if name == "fa3":
        found.append(s.evidence(s["capability"]))
    elif name == "flashmla":
        found.append(m.evidence(m["flashmla"]["dense_fp8" if case.q.fp8 else "dense_bf16"]))
    elif name == "trtllm_mla":
        found.append(f.evidence(f["mla_shape"]))
    elif name == "triton" and case.q.kv_dtype == "fp8_e4m3":
        found.append(case.t.evidence(case.t["e4m3"]))
    if name == "triton" and case.q.fp8:
        shown = (s["rounds_q"].get(fact) for fact in ("triton_widens", "triton_p"))
        found += [s.evidence(fact, "code") for fact in shown if fact]
    return found


def _accuracy(case: Case, name: str, rounds: bool) -> str:
    if not case.q.fp8:
        return "BF16 rows, nothing is rounded to FP8"
    if name == "triton" and "triton_p" in case.s["rounds_q"]:
        if rounds:
            return "rounds the query and the attention probabilities to FP8 as well as the rows"
        return (
            "decode widens the rows for the query's product and rounds the attention probabilities "
            "to FP8 for "
            "the values' (prefill after a prefix rounds the query too)"
        )
    if rounds:
        return "rounds the query to FP8 as well as the rows"
    return "the rows are FP8, the query stays in the model's dtype"


def _heads(case: Case, name: str) -> str:
    if name == "trtllm_mla" and case.q.major == 12:
        return "128 a rank (XQA)"
    if name == "cutlass_mla":
        return "up to 128 a rank (padded to 128)"
    return "any"


def _flags(case: Case, name: str) -> list[str]:
    q = case.q
    found = [
        f"--attention-backend {name}",
        f"--kv-cache-dtype {'bfloat16' if q.kv_dtype == 'bf16' else q.kv_dtype}",
    ]
    if name == "cutedsl_mla":
        found[0] = "--decode-attention-backend cutedsl_mla"
    if case.is_dsa and q.fp8:
        raw = case.raw_rows()
        if not any(d in raw for d in case.sub_defaults()):
            option = case.dsa["name"]
            found += [f"--{option}-prefill-backend {raw[-1]}", f"--{option}-decode-backend {raw[-1]}"]
    rule = case.s["constraints"].get(name, {}).get("page")
    if rule and not case.is_dsa:
        found.append(f"--page-size {checks.page_size(case, name)}")
    return found


def _is_default(case: Case, name: str) -> bool:
    if case.is_dsa:
        return False
    default = case.s["default_mla"]
    if case.q.major == 10 and case.q.geometry.architecture in (
        "Glm4MoeLiteForCausalLM",
        "LongcatFlashForCausalLM",
    ):
        # The SM100 override is the DeepSeek family's; other MLA models get the general default.
        return name == "flashinfer"
    return name == default[str(min(case.q.major, 12))]


def elsewhere(case: Case, name: str) -> Verdict:
    where = OTHER_HARDWARE[name]
    return Verdict(
        backend=name,
        works=False,
        reason=f"serves {where}; this card is {case.q.gpu.name}",
        refusals=[f"serves {where}"],
        evidence=[case.s.evidence(case.s["registered"][name], "code")],
        versions=case.versions,
    )
