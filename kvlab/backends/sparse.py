"""DeepSeek Sparse Attention by sub-backend: who reads which rows on which card."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvlab.backends import checks
from kvlab.backends.case import Case, Finding, Verdict

_SUB_OTHER = {"aiter": "AMD GPUs", "triton": "AMD GPUs", "intel_xpu": "Intel GPUs"}


def verdicts(case: Case) -> list[Verdict]:
    """DeepSeek Sparse Attention by sub-backend; one row that says so where the model has no indexer."""
    s, dsa = case.s, case.dsa
    name = dsa["name"]
    if not case.is_dsa:
        text = "the model has no DSA indexer"
        if case.q.geometry.has_indexer:
            text = f"SGLang {s.release} does not know {case.q.geometry.architecture} as a DSA model"
        evidence = [
            s.evidence(
                dsa["architectures"],
                "check",
                f"{dsa['architectures']['quote']}: {dsa['architectures']['value']}",
            )
        ]
        if dsa["wants_dsa"]:
            evidence.append(s.evidence(dsa["wants_dsa"]))
        for unknown in checks.model_known(case):
            text, evidence = unknown.text, list(unknown.evidence)
        return [
            Verdict(
                backend=name,
                works=False,
                reason=text,
                refusals=[text],
                evidence=evidence,
                versions=case.versions,
                attends="sparse",
            )
        ]
    rows = [_sub(case, sub) for sub in dsa["choices"]["value"]]
    prefill, decode = case.sub_defaults()
    chosen = next(r for r in rows if r.default)
    # The backend as SGLang starts it: the sub-backends that it picks by itself.
    whole = msgspec.structs.replace(
        chosen,
        backend=name,
        reason=f"with the sub-backends that it picks here (prefill {prefill}, decode {decode}): "
        f"{chosen.reason}",
        flags=chosen.flags[:1] + chosen.flags[-1:],
    )
    return [whole, *(msgspec.structs.replace(r, default=False) for r in rows)]


def _sub(case: Case, sub: str) -> Verdict:
    q, s, dsa = case.q, case.s, case.dsa
    option = dsa["name"]
    findings = [*checks.model_known(case), *_sub_checks(case, sub)]
    refused = [f for f in findings if f.refuses]
    settled = sub not in ("tilelang",) or bool(refused) or q.major == 9
    prefill, decode = case.sub_defaults()
    quantizes = sub == "flashmla_kv" and not q.fp8 and dsa["quantizes_pool"]
    evidence = [e for f in refused for e in f.evidence]
    if not refused:
        evidence = [e for f in findings for e in f.evidence]
        evidence.append(s.evidence(dsa["serves"]["decode"], "code", f"forward_decode has a branch for {sub}"))
        if quantizes:
            evidence.append(s.evidence(dsa["quantizes_pool"], "code"))
    rounds = sub == "trtllm" and q.fp8
    reason = "nothing in the release refuses it; it reads the rows of the selected tokens"
    if quantizes:
        reason = "nothing in the release refuses it; it quantizes a BF16 cache whole, in every layer"
    if not settled:
        reason = f"the source has no check that refuses it on {q.gpu.sm}, and no run has shown it"
    return Verdict(
        backend=f"{option}.{sub}",
        works=False if refused else (True if settled else None),
        reason=refused[0].text if refused else reason,
        refusals=[f.text for f in refused],
        evidence=evidence,
        versions=case.versions,
        default=sub == decode,
        attends="sparse",
        casts_pool=bool(quantizes) and not refused,
        casts=["decode"] if quantizes and not refused else [],
        rounds_q=rounds,
        accuracy="rounds the query to FP8 as well as the rows"
        if rounds
        else ("rows in blocks of 128 with FP32 scales, RoPE part in BF16" if q.fp8 else "BF16 rows"),
        page_sizes="64 (DSA)",
        page_size=None if refused else 64,
        heads="multiples of 64, or padded to 64 (SM90) or 128" if sub.startswith("flashmla") else "any",
        row_bytes=dsa["rows"]["value"][sub] if q.fp8 else q.geometry.latent_dim * 2,
        flags=[]
        if refused
        else [
            f"--attention-backend {option}",
            f"--{option}-prefill-backend {sub}",
            f"--{option}-decode-backend {sub}",
            f"--kv-cache-dtype {'bfloat16' if q.kv_dtype == 'bf16' else q.kv_dtype}",
        ],
        notes=[f.text for f in findings if not f.refuses]
        + ([f"the release's default prefill sub-backend here is {prefill}"] if sub == decode else []),
    )


def _sub_checks(case: Case, sub: str) -> Iterator[Finding]:
    q, s, dsa, f = case.q, case.s, case.dsa, case.f
    if where := _SUB_OTHER.get(sub):
        yield Finding(text=f"serves {where}", evidence=(s.evidence(dsa["choices"], "code"),))
        return
    if q.kv_dtype == "fp8_e5m2":
        yield Finding(
            text="a DSA model's cache may be bf16 or fp8_e4m3 only",
            evidence=(s.evidence(dsa["default_kv_dtype"]),),
        )
    if sub not in dsa["serves"]["decode"]["value"]:
        yield Finding(
            text=f"{sub} serves prefill alone: forward_decode has no branch for it",
            evidence=(s.evidence(dsa["serves"]["decode"], "check"),),
        )
        return
    if sub.startswith("flashmla"):
        rule = case.m["flashmla"]["sparse"]
        if q.major not in (9, 10):
            yield Finding(
                text="FlashMLA's sparse kernels are built for SM90 and SM100, this card is "
                f"{q.gpu.sm}: {rule['quote']}",
                evidence=(case.m.evidence(rule),),
            )
        if sub == "flashmla_sparse" and q.fp8:
            yield Finding(
                text="its decode reads BF16 rows; FP8 rows are dequantized for prefill alone",
                evidence=(s.evidence(dsa["serves"]["decode"], "code"),),
            )
    elif sub == "fa3":
        if q.major != 9:
            yield Finding(
                text=f"FlashAttention 3 serves MLA on SM90 alone, this card is {q.gpu.sm}",
                evidence=(s.evidence(s["capability"]),),
            )
        if q.fp8:
            yield Finding(
                text="it hands the rows to FlashAttention 3 as they are, which wants them in the "
                "query's dtype",
                evidence=(s.evidence(dsa["serves"]["decode"], "code"),),
            )
    elif sub == "trtllm":
        if q.major != 10:
            auto = f["xqa"]["auto"]
            yield Finding(
                text=f"asks flashinfer for trtllm-gen by name, which is SM100's; this card is {q.gpu.sm}",
                evidence=(s.evidence(dsa["trtllm_gen"]), *((f.evidence(auto, "code"),) if auto else ())),
            )
        else:
            yield from checks.mla_shape(case)
    elif sub == "flashinfer_sparse_mla":
        if q.major != 12:
            yield Finding(
                text=f"flashinfer's packed sparse MLA is SM120's, this card is {q.gpu.sm}",
                evidence=(s.evidence(dsa["sparse_sm120"], "code"),) if dsa["sparse_sm120"] else (),
            )
        if not q.fp8:
            yield Finding(
                text="reads packed FP8 rows alone",
                evidence=(s.evidence(dsa["sparse_sm120"], "code"),) if dsa["sparse_sm120"] else (),
            )
    elif sub == "tilelang" and q.fp8 and dsa["rows"]["value"]["tilelang"] != q.geometry.latent_dim:
        yield Finding(
            text="on CUDA its kernel reads BF16 rows; this release stores FP8 rows with scales inside",
            evidence=(
                s.evidence(
                    dsa["rows"], "run", f"{dsa['rows']['quote']}: tilelang {dsa['rows']['value']['tilelang']}"
                ),
            ),
        )
