"""The two failures of the source text, raised again by the releases' own code, and the checks beside them.

`python -m kvlab.backends.reproduce` prints what is raised here; `--record FILE` keeps it with its provenance.
Every function takes the release's source (`sources.fetch`) and runs its code on CPU; no kernel is launched.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from kvlab.backends import extract_flashinfer, extract_sglang_defaults, probe, sources
from kvlab.backends.sources import Tree


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of a release's own code: what was called, what it said, and where."""

    name: str
    call: str
    package: str
    release: str
    exception: str
    says: str
    file: str
    line: int
    quote: str

    @property
    def words(self) -> str:
        """The exception as a traceback ends with it; a bare assertion has its line for words."""
        return f"{self.exception}: {self.says}" if self.says else f"{self.exception} at `{self.quote}`"

    @property
    def where(self) -> str:
        """Package, release, file and line of the frame that raised."""
        return f"{self.package} {self.release}, {self.file}:{self.line}"


def _catch(name: str, call: str, tree: Tree, run: Callable[[], Any]) -> Raised:
    try:
        run()
    except (ValueError, AssertionError) as e:
        frame = next(
            f for f in reversed(traceback.extract_tb(e.__traceback__)) if f.filename.startswith(tree.package)
        )
        return Raised(
            name=name,
            call=call,
            package=tree.package,
            release=tree.release,
            exception=type(e).__name__,
            says=str(e),
            file=frame.filename.split("/", 1)[1],
            line=frame.lineno or 0,
            quote=(frame.line or "").strip(),
        )
    raise LookupError(f"{tree.package} {tree.release}: {call} raised nothing")


def qk_nope_head_dim(tree: Tree, nope: int = 192) -> Raised:
    """trtllm_mla on GLM-5: flashinfer's shape check refuses qk_nope_head_dim 192 (0.6.0 to 0.6.4)."""
    check = extract_flashinfer.shape_check(tree)
    given = _mla_call(nope=nope, page=64, blocks=2)
    return _catch(
        "trtllm_mla", f"_check_trtllm_gen_mla_shape(qk_nope_head_dim={nope}, …)", tree, lambda: check(**given)
    )


def block_num(tree: Tree, page: int = 64, blocks: int = 1) -> Raised:
    """The same check's page rule: the page table must cover a multiple of 128 tokens."""
    check = extract_flashinfer.shape_check(tree)
    given = _mla_call(nope=128, page=page, blocks=blocks)
    call = f"_check_trtllm_gen_mla_shape(page_size={page}, page_table=[1, {blocks}], …)"
    return _catch("trtllm_mla block_num", call, tree, lambda: check(**given))


def page_size_of(tree: Tree, backend: str) -> int:
    """What the release's argument handler makes of `--attention-backend BACKEND` and page size 64."""
    args = _args(backend)
    handler = tree.module("sglang/srt/arg_groups/overrides.py")
    if handler and handler.function("_mla_backend_page_constraints"):
        found = handler.real("_mla_backend_page_constraints", probe.namespace({}, {}))(args)
        return found.get("page_size", args.page_size)
    name = "_handle_attention_backend_compatibility"
    values = extract_sglang_defaults.platform(10)
    scope = probe.namespace(values, {"sglang": probe.Stub(current_platform=values["current_platform"])})
    tree.module("sglang/srt/server_args.py").real(name, scope)(args)
    return args.page_size


def pool_page_size(tree: Tree, page: int) -> Raised:
    """cutlass_mla on GLM-5: SGLang moves it to page size 128, and the DSA pool's own assertion wants 64."""
    import contextlib

    module = tree.module("sglang/srt/mem_cache/memory_pool.py")
    cls = next(c for c in ("DSATokenToKVPool", "NSATokenToKVPool") if module.cls(c))
    # The base allocates rows on a GPU; the assertion under test reads the page size that it keeps.
    scope = probe.namespace(
        {
            "MLATokenToKVPool": _Pool,
            "torch": probe.Stub(uint8="uint8", bfloat16="bfloat16"),
            "_is_hip": False,
            "is_hip": lambda: False,
            "is_xpu": lambda: False,
            "nullcontext": contextlib.nullcontext,
            "__name__": __name__,
        },
        {"sglang": probe.Stub()},
    )
    pool = module.real_class(cls, scope)
    given = {
        "size": 1024,
        "page_size": page,
        "kv_lora_rank": 512,
        "dtype": "fp8",
        "qk_rope_head_dim": 64,
        "layer_num": 1,
        "device": "cpu",
        "index_head_dim": 128,
        "enable_memory_saver": False,
        "kv_cache_dim": 576,
    }
    return _catch("cutlass_mla", f"{cls}(page_size={page}, …)", tree, lambda: pool(**given))


class _Pool:
    def __init__(self, size: int, page_size: int, *_: Any, **__: Any) -> None:
        self.size, self.page_size = size, page_size


def cutlass_page(tree: Tree, page: int = 64, blocks: int = 1) -> Raised:
    """cutlass_mla_decode's own page assertion, for who calls it with pages under 128."""
    return _cutlass(tree, "cutlass_mla_decode block_num", page=page, blocks=blocks, cache="bfloat16")


def cutlass_dtype(tree: Tree) -> Raised:
    """cutlass_mla_decode on an FP8 cache: the query's dtype must be the cache's."""
    return _cutlass(tree, "cutlass_mla_decode dtype", page=128, blocks=1, cache="float8_e4m3fn")


def _cutlass(tree: Tree, name: str, *, page: int, blocks: int, cache: str) -> Raised:
    import torch

    function = tree.module("sgl_kernel/attention.py").real("cutlass_mla_decode", {"torch": torch})
    given = {
        "q_nope": torch.empty(1, 8, 512, dtype=torch.bfloat16),
        "q_pe": torch.empty(1, 8, 64, dtype=torch.bfloat16),
        "kv_c_and_k_pe_cache": torch.empty(2, page, 576, dtype=torch.bfloat16).to(getattr(torch, cache)),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "page_table": torch.zeros(1, blocks, dtype=torch.int32),
        "workspace": torch.empty(0, dtype=torch.uint8),
        "sm_scale": 1.0,
    }
    call = f"cutlass_mla_decode(page size {page}, {blocks} block, cache {cache})"
    return _catch(name, call, tree, lambda: function(**given))


def _mla_call(*, nope: int, page: int, blocks: int) -> dict[str, Any]:
    import torch

    return {
        "query": torch.empty(1, 1, 8, 576, dtype=torch.float8_e4m3fn, device="meta"),
        "kv_cache": torch.empty(2, 1, page, 576, dtype=torch.float8_e4m3fn, device="meta"),
        "qk_nope_head_dim": nope,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "page_table": torch.empty(1, blocks, dtype=torch.int32, device="meta"),
        "page_size": page,
    }


def _args(backend: str) -> probe.Stub:
    config = probe.Stub(hf_config=probe.Stub(architectures=["GlmMoeDsaForCausalLM"]), context_len=4096)
    return probe.Stub(
        attention_backend=backend,
        page_size=64,
        kv_cache_dtype="fp8_e4m3",
        device="cuda",
        get_model_config=lambda: config,
        use_mla_backend=lambda: True,
    )


def all_of(
    flashinfer: str = "0.6.3", sglang: str = "0.5.9", kernel: str = "sgl-kernel==0.3.21"
) -> list[Raised]:
    """Both failures of the source text and their neighbours, raised by the releases that it ran."""
    fi, sgl, kern = (
        sources.fetch("flashinfer-python", flashinfer),
        sources.fetch("sglang", sglang),
        sources.fetch(*kernel.split("==")),
    )
    page = page_size_of(sgl, "cutlass_mla")
    return [
        qk_nope_head_dim(fi),
        block_num(fi),
        pool_page_size(sgl, page),
        cutlass_page(kern),
        cutlass_dtype(kern),
    ]


def shown() -> tuple[str, list[Raised]]:
    """For a page: raised here where the three releases are at hand, else as recorded. Downloads nothing.

    The first value says which: `raised here`, or the recorded file.
    """
    from kvlab import data

    wanted = (("flashinfer-python", "0.6.3"), ("sglang", "0.5.9"), ("sgl-kernel", "0.3.21"))
    if all(sources.at_hand(package, release) for package, release in wanted):
        return "raised here", all_of()
    path = data.recorded("backend-failures") / "raised.json"
    document = msgspec.json.decode(path.read_bytes())
    return "data/recorded/backend-failures/raised.json", msgspec.convert(document["raised"], list[Raised])


def main(argv: list[str]) -> None:
    """Print, or with `--record FILE` write, what is raised here."""
    from kvlab import provenance

    found = all_of()
    if argv[:1] == ["--record"]:
        document = {"provenance": provenance.collect(), "raised": found}
        text = msgspec.json.format(msgspec.json.encode(document), indent=1)
        with open(argv[1], "wb") as f:
            f.write(text + b"\n")
    for r in found:
        print(
            f"{r.package} {r.release} {r.file}:{r.line}\n    {r.call}\n    {r.exception}: {r.says or r.quote}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
