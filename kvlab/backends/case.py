"""A question beside the rules that answer it, and the shape of an answer."""

from __future__ import annotations

from typing import Any

import msgspec

from kvlab import gpus, models
from kvlab.backends import live, rules
from kvlab.backends.rules import Evidence, Rules
from kvlab.errors import BadInput

KV_DTYPES = ("fp8_e4m3", "fp8_e5m2", "bf16")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked: a model on a card, its release, its KV dtype and the flags that change the answer."""

    geometry: models.MlaGeometry
    gpu: gpus.Gpu
    sglang: str
    flashinfer: str
    kv_dtype: str
    tp: int
    heads: int
    page_size: int | None = None

    @property
    def major(self) -> int:
        assert self.gpu.compute_capability is not None
        return self.gpu.compute_capability[0]

    @property
    def capability(self) -> int:
        assert self.gpu.compute_capability is not None
        return self.gpu.compute_capability[0] * 10 + self.gpu.compute_capability[1]

    @property
    def fp8(self) -> bool:
        return self.kv_dtype.startswith("fp8")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check that refuses, or one thing that a reader must know."""

    text: str
    evidence: tuple[Evidence, ...] = ()
    refuses: bool = True


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's answer.

    `works`: True where no check of the release refuses and its kernels are built for the card; False with
    the first refusal as `reason` and all of them in `refusals`; None where the source does not settle it.
    `casts_pool`: whether a decode step casts the whole pool; `casts` says in which phases. `row_bytes`: one
    token in one layer of the pool that this backend needs. `flags`: what must be passed to be served so.
    `cost`: recorded microseconds, or None.
    `served`: recorded runs that tried it on this card with this release.
    """

    backend: str
    works: bool | None
    reason: str
    evidence: list[Evidence]
    versions: dict[str, str]
    refusals: list[str] = []
    default: bool = False
    attends: str = "dense"
    casts_pool: bool = False
    casts: list[str] = []
    rounds_q: bool | None = None
    accuracy: str = ""
    page_sizes: str = "any"
    page_size: int | None = None
    heads: str = "any"
    row_bytes: int | None = None
    flags: list[str] = []
    notes: list[str] = []
    cost: dict[str, Any] | None = None
    served: list[dict[str, Any]] = []


def question(
    model: str,
    gpu: str,
    sglang: str,
    *,
    flashinfer: str | None = None,
    kv_dtype: str = "fp8_e4m3",
    tp: int | None = None,
    page_size: int | None = None,
) -> Question:
    """Read names into a Question. Raises BadInput.

    `flashinfer` defaults to the release that the SGLang pins, `tp` to 8 or the most ranks under it that the
    heads divide by.
    """
    geometry, card = models.load(model), gpus.lookup(gpu)
    if card.compute_capability is None:
        raise BadInput(f"--gpu {gpu}: its compute capability is not known; name a card of the sheet")
    pinned = live.load("sglang", sglang)["pins"]["flashinfer-python"]
    chosen = flashinfer or pinned
    live.load("flashinfer-python", chosen)
    alias = {"fp8": "fp8_e4m3", "bfloat16": "bf16", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
    dtype = alias.get(kv_dtype, kv_dtype)
    if dtype not in KV_DTYPES:
        raise BadInput(f"--kv-dtype {kv_dtype}: use one of {', '.join(KV_DTYPES)}")
    if page_size is not None and page_size < 1:
        raise BadInput(f"--page-size {page_size}: it must be at least 1")
    if tp is None:
        tp = next(n for n in range(8, 0, -1) if geometry.num_attention_heads % n == 0)
    heads = models.rank(geometry, tp=tp).heads
    return Question(
        geometry=geometry,
        gpu=card,
        sglang=sglang,
        flashinfer=chosen,
        kv_dtype=dtype,
        tp=tp,
        heads=heads,
        page_size=page_size,
    )


class Case:
    """A question beside the rules of the releases in it."""

    def __init__(self, q: Question) -> None:
        load = live.load
        self.q = q
        self.s: Rules = load("sglang", q.sglang)
        self.f: Rules = load("flashinfer-python", q.flashinfer)
        self.t: Rules = load("triton", rules.releases("triton")[-1])
        pins = self.s["pins"]
        kernel = next(k for k in ("sglang-kernel", "sgl-kernel") if k in pins)
        self.k: Rules = load(kernel, pins[kernel])
        # From 0.5.23 FlashMLA is a package of its own.
        self.m: Rules = load("sgl-flash-mla", pins["sgl-flash-mla"]) if "sgl-flash-mla" in pins else self.k
        self.dsa: dict[str, Any] = self.s["dsa"]
        self.is_dsa = q.geometry.has_indexer and q.geometry.architecture in self.dsa["architectures"]["value"]
        self.versions = {
            "sglang": q.sglang,
            "flashinfer": q.flashinfer,
            kernel: pins[kernel],
            "torch": pins["torch"],
        }

    def sub_defaults(self) -> tuple[str, str]:
        """The DSA sub-backends (prefill, decode) that the release picks on this card."""
        table = self.dsa["defaults"]
        by_dtype = table.get(self.q.geometry.architecture, table["*"])
        prefill, decode = by_dtype["fp8_e4m3" if self.q.fp8 else "bfloat16"][str(min(self.q.major, 12))]
        return prefill, decode

    def raw_rows(self) -> list[str]:
        """Sub-backends whose choice keeps FP8 rows at 576 bytes, so that a dense backend can read them."""
        return [
            name for name, size in self.dsa["rows"]["value"].items() if size == self.q.geometry.latent_dim
        ]
