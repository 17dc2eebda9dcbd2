"""What refuses a dense MLA backend, check by check, in the order in which a server meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvlab.backends import rules
from kvlab.backends.case import Case, Finding
from kvlab.backends.rules import Evidence

# What a name is called in SGLang's own argument checks.
_SGLANG_DTYPE = {"bf16": ("bf16", "bfloat16"), "fp8_e4m3": ("fp8_e4m3",), "fp8_e5m2": ("fp8_e5m2",)}


def model_known(case: Case) -> Iterator[Finding]:
    """The release must have the model, and serve it with MLA."""
    architecture, s = case.q.geometry.architecture, case.s
    if architecture is None:
        return
    if architecture not in s["models"] or architecture not in s["mla_architectures"]["value"]:
        since = next(
            (
                r
                for r in rules.releases()
                if architecture in (o := rules.load("sglang", r))["models"]
                and architecture in o["mla_architectures"]["value"]
            ),
            None,
        )
        first = f"; the first release with it is {since}" if since else ""
        yield Finding(
            text=f"SGLang {s.release} has no {architecture}{first}",
            evidence=(s.evidence(s["mla_architectures"], "check", f"MLA architectures: no {architecture}"),),
        )


def registered(case: Case, name: str) -> Iterator[Finding]:
    s = case.s
    if name in s["registered"]:
        return
    having = [r for r in rules.releases() if name in rules.load("sglang", r)["registered"]]
    where = s["choices"]
    when = f"; releases with it: {having[0]} to {having[-1]}" if having else ""
    alias = name in where["value"]
    yield Finding(
        text=f"SGLang {s.release} has no backend {name}{when}"
        + ("; the name is kept as an alias of cutedsl_mla" if alias else ""),
        evidence=(
            Evidence(
                kind="check",
                package="sglang",
                release=s.release,
                file=where["file"],
                line=where["line"],
                quote=f"{where['quote']}: {', '.join(where['value'])}",
            ),
        ),
    )


def dsa_rows(case: Case, name: str) -> Iterator[Finding]:
    """A dense backend on a DSA model: which rows it finds, and what becomes of the indexer."""
    q, dsa, s = case.q, case.dsa, case.s
    if not case.is_dsa:
        return
    skips = dsa["skips_indexer"]
    if skips:
        yield Finding(
            text="attends to every token: a backend without indexer metadata makes the DSA indexer "
            "return None",
            evidence=(s.evidence(skips, "code"),),
            refuses=False,
        )
    if q.kv_dtype == "fp8_e5m2":
        yield Finding(
            text="a DSA model's cache may be bf16 or fp8_e4m3 only",
            evidence=(s.evidence(dsa["default_kv_dtype"], "check"),),
        )
    if not q.fp8:
        return
    raw, rows = case.raw_rows(), dsa["rows"]
    wide = max(rows["value"].values())
    narrow = q.geometry.latent_dim
    if not raw:
        yield Finding(
            text=f"its FP8 rows are {wide} bytes with scales inside, whatever reads them, and a dense "
            "backend reads "
            f"{narrow}: flashinfer and triton return wrong numbers without a word, others fail on the shape",
            evidence=(s.evidence(rows, "code"),),
        )
        return
    defaults = case.sub_defaults()
    if not any(d in raw for d in defaults):
        option = dsa["name"]
        yield Finding(
            text=f"needs {narrow}-byte rows: pass {raw[-1]} as --{option}-prefill-backend and "
            f"--{option}-decode-backend, which chooses the rows and then never runs; by default "
            f"({defaults[0]}, "
            f"{defaults[1]}) rows are {wide} bytes and flashinfer and triton misread them without a word",
            evidence=(s.evidence(rows, "run", f"{rows['quote']}: {rows['value']}"),),
            refuses=False,
        )


def page_size(case: Case, name: str) -> int:
    """The page size that the server ends up with for this backend."""
    page = 64 if case.is_dsa else (case.q.page_size or 1)
    rule = case.s["constraints"].get(name, {}).get("page")
    if rule and page not in rule["sizes"]:
        page = rule["becomes"]
    return page


def page_sizes(case: Case, name: str) -> str:
    if case.is_dsa:
        return "64 (DSA)"
    rule = case.s["constraints"].get(name, {}).get("page")
    return " or ".join(map(str, rule["sizes"])) if rule else "any"


def page(case: Case, name: str) -> Iterator[Finding]:
    s, q = case.s, case.q
    rule = s["constraints"].get(name, {}).get("page")
    page = page_size(case, name)
    if case.is_dsa:
        pool = case.dsa["pool_page"]
        if page != pool["value"]:
            yield Finding(
                text=f"SGLang moves {name} to page size {page}, and the pool of a DSA model asserts "
                "page size "
                f"{pool['value']}: AssertionError before the first request",
                evidence=(s.evidence(rule), s.evidence(pool)),
            )
        elif q.page_size not in (None, page):
            yield Finding(
                text=f"--page-size {q.page_size} is overwritten: a DSA model's page size is {page}",
                evidence=(s.evidence(case.dsa["sets_page"], "code"),) if case.dsa["sets_page"] else (),
                refuses=False,
            )
    elif rule and q.page_size not in (None, page):
        yield Finding(
            text=f"--page-size {q.page_size} becomes {page}: {name} takes "
            f"{' or '.join(map(str, rule['sizes']))}",
            evidence=(s.evidence(rule, "code"),),
            refuses=False,
        )


def _platform(case: Case, name: str) -> Iterator[Finding]:
    """What the argument handler refuses: platform and KV dtype."""
    constraint = case.s["constraints"].get(name, {})
    for refusal in constraint.get("refuses", []):
        majors = (
            case.s["platforms"].get(refusal["platform"])
            or case.s["platforms"][refusal["platform"] + "_supported"]
        )
        if case.q.major not in majors:
            yield Finding(
                text=f"{refusal['says']} This card is {case.q.gpu.sm}.", evidence=(case.s.evidence(refusal),)
            )
    dtypes = constraint.get("kv_dtypes")
    if dtypes and not set(_SGLANG_DTYPE[case.q.kv_dtype]) & set(dtypes["value"]):
        yield Finding(
            text=f"--kv-cache-dtype {case.q.kv_dtype}: {dtypes['says']}", evidence=(case.s.evidence(dtypes),)
        )


def _flashinfer(case: Case) -> Iterator[Finding]:
    q, f = case.q, case.f
    native = f["native_fp8"]
    if q.fp8 and native and q.major in native["majors"] and q.kv_dtype == "fp8_e4m3":
        yield Finding(
            text=f"flashinfer {f.release} could read the FP8 rows itself "
            f"({', '.join(native['kernels'])}); SGLang "
            f"{q.sglang} does not ask it to",
            evidence=(f.evidence(native, "code"),),
            refuses=False,
        )


def _fa3(case: Case) -> Iterator[Finding]:
    q, rule = case.q, case.s["capability"]
    if q.major not in rule["majors"]:
        yield Finding(
            text=f"fa3 serves MLA on SM90 alone, this card is {q.gpu.sm}: {rule['says']}",
            evidence=(case.s.evidence(rule),),
        )
    if q.kv_dtype == "fp8_e5m2":
        yield Finding(
            text="fa3 takes fp8_e4m3 alone; SGLang puts triton in its place for fp8_e5m2",
            evidence=(case.s.evidence(case.s["fa3_fp8"]),),
        )


def _fa4(case: Case) -> Iterator[Finding]:
    rule = case.s["fa4"]
    if rule and 4 not in rule["versions"]:
        yield Finding(
            text="the absorbed MLA path is for FlashAttention 3: fa4 serves MLA's first prefill and "
            "dies at the rest; in decode its layers come unabsorbed, and the rows cannot be viewed",
            evidence=(case.s.evidence(rule), case.s.evidence(rule["decode"])),
        )
    elif case.q.major not in (10, 11):
        yield Finding(
            text="flash_attn.cute implements absorbed MLA (its qv argument) on SM100 and SM110, this "
            "card is "
            f"{case.q.gpu.sm}",
            evidence=(case.s.evidence(rule, "code"),) if rule else (),
        )


def _flashmla(case: Case) -> Iterator[Finding]:
    q, m = case.q, case.m
    rule = m["flashmla"]["dense_fp8" if q.fp8 else "dense_bf16"]
    if q.major != 9:
        yield Finding(
            text=f"FlashMLA's dense decode is built for SM90, this card is {q.gpu.sm}: {rule['quote']}",
            evidence=(m.evidence(rule),),
        )


def _cutlass_mla(case: Case) -> Iterator[Finding]:
    q, k = case.q, case.k
    rule = k["cutlass_mla"]
    if rule is None:
        absent = Evidence(
            kind="check",
            package=k.package,
            release=k.release,
            file="sgl_kernel/attention.py",
            quote="no def cutlass_mla_decode",
        )
        yield Finding(text=f"{k.package} {k.release} has no cutlass_mla_decode", evidence=(absent,))
        return
    if q.fp8:
        yield Finding(
            text=f"the kernel takes a cache in the query's own dtype, FP16 or BF16, not {q.kv_dtype}: "
            "AssertionError",
            evidence=(k.evidence(rule["same_dtype"]), k.evidence(rule["q_dtype"])),
        )
    if q.major != 10:
        yield Finding(
            text=f"built for compute capability 10.0, this card is {q.gpu.sm}: {rule['device']['quote']}",
            evidence=(k.evidence(rule["device"]),),
        )
    if q.heads > rule["max_heads"]["value"]:
        yield Finding(text=f"{q.heads} heads a rank, at most 128", evidence=(k.evidence(rule["max_heads"]),))


def _trtllm_mla(case: Case) -> Iterator[Finding]:
    yield from _platform(case, "trtllm_mla")
    if case.q.major in case.s["platforms"]["is_blackwell_supported"]:
        # In the order in which a call meets them.
        if case.q.major == 12:
            yield from _xqa_dtypes(case)
        yield from mla_shape(case)
        yield from _xqa_heads(case) if case.q.major == 12 else _ragged(case)


def mla_shape(case: Case) -> Iterator[Finding]:
    """flashinfer's check of head dimensions before the kernel."""
    g, f = case.q.geometry, case.f
    rule = f["mla_shape"]
    nope = str(g.qk_nope_head_dim)
    if nope in rule["says"]:
        yield Finding(
            text=f"flashinfer {f.release}: {rule['says'][nope]}",
            evidence=(
                f.evidence(rule, "check"),
                f.evidence(rule, "run", f"ValueError: {rule['says'][nope]}"),
            ),
        )
    if [g.kv_lora_rank, g.qk_rope_head_dim] not in rule["latent"]:
        yield Finding(
            text=f"flashinfer {f.release} has no MLA kernel for {g.kv_lora_rank} + {g.qk_rope_head_dim}",
            evidence=(f.evidence(rule),),
        )


def _ragged(case: Case) -> Iterator[Finding]:
    """Prefill without a prefix goes to a ragged kernel with its own list of head dimensions."""
    g, f = case.q.geometry, case.f
    rule = f["ragged_prefill"]
    dims = [g.qk_nope_head_dim + g.qk_rope_head_dim, g.v_head_dim]
    if rule and dims in [[256, 256]] and dims not in rule["value"]:
        yield Finding(
            text=f"its prefill takes head dimensions {rule['value']}, the model has {dims}: {rule['says']}",
            evidence=(f.evidence(rule),),
        )


def _xqa_dtypes(case: Case) -> Iterator[Finding]:
    """On SM120 `auto` takes XQA: FP8 query with FP8 rows, and later BF16 with BF16."""
    q, f = case.q, case.f
    rule = f["xqa"]["dtypes"]
    pair = ["fp8", "fp8"] if q.fp8 else ["bf16", "bf16"]
    if pair not in rule["value"] or q.kv_dtype == "fp8_e5m2":
        yield Finding(
            text=f"flashinfer {f.release} on SM120 is XQA, not for {q.kv_dtype}: {rule['says']}",
            evidence=(f.evidence(rule),),
        )


def _xqa_heads(case: Case) -> Iterator[Finding]:
    """XQA's MLA kernel is built for 128 query heads; until 0.6.7 nobody checked."""
    q, f = case.q, case.f
    heads = f["xqa"]["heads"]
    if q.heads == heads["value"]:
        return
    built = (
        f"flashinfer {f.release} on SM120 is XQA, for {heads['value']} query heads a rank; here: {q.heads}"
    )
    how = (
        ", refused: " + heads["says"].replace("{num_q_heads}", str(q.heads))
        if heads["checked"]
        else ", which nothing checks: it would read past them"
    )
    yield Finding(text=built + how, evidence=(f.evidence(heads),))


def _cutedsl_mla(case: Case) -> Iterator[Finding]:
    yield from _platform(case, "cutedsl_mla")
    if case.q.major == 10:
        if case.f["cute_dsl"] is None:
            f = case.f
            yield Finding(
                text=f"flashinfer {f.release} has no cute-dsl MLA decode",
                evidence=(f.evidence(f["xqa"]["auto"], says="backends: trtllm-gen and xqa alone"),),
            )
        yield from _ragged(case)


def _tokenspeed_mla(case: Case) -> Iterator[Finding]:
    yield from _platform(case, "tokenspeed_mla")
    if case.q.major == 12:
        yield Finding(
            text="its CuTe DSL kernels are SM100's, although the argument check admits SM120",
            evidence=(case.s.evidence(case.s["tokenspeed"], "code"),),
        )


def _triton(case: Case) -> Iterator[Finding]:
    rule = case.t["e4m3"]
    if case.q.kv_dtype == "fp8_e4m3" and case.q.capability < rule["capability"]:
        yield Finding(
            text="Triton compiles e4m3 (fp8e4nv) from compute capability "
            f"{rule['capability'] / 10:.1f} up, this card is "
            f"{case.q.gpu.sm}; fp8_e5m2 works there",
            evidence=(case.t.evidence(rule),),
        )


BY_BACKEND: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "flashinfer": _flashinfer,
    "fa3": _fa3,
    "fa4": _fa4,
    "flashmla": _flashmla,
    "cutlass_mla": _cutlass_mla,
    "trtllm_mla": _trtllm_mla,
    "cutedsl_mla": _cutedsl_mla,
    "tokenspeed_mla": _tokenspeed_mla,
    "triton": _triton,
}
