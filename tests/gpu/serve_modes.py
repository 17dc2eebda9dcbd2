"""Which modes of SGLang does prove_serve.py serve with and without the patch, and what shows that one is on?

Plain data: `serve_cases.py` makes of each a server without the patch, NAME_off, and one with it, NAME. They
take their steps in turn, so that neither the race of the plans nor who shares the GPU changes a token.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mode:
    """`shows`: what the witness (serve_witness.py) must have counted. `then`: what happens after the first
    answers. `model`: which rank, "" or the end of its folder's name. `repeats`: is an unpatched server
    started twice, because it may not repeat itself? `fast`: one with that policy too. `alone`: answers while
    no other server works on the GPU.
    """

    args: dict[str, Any]
    shows: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    model: str = ""
    then: str = ""
    repeats: bool = False
    fast: bool = False
    alone: bool = False
    mixed: bool = False


# Tokens of a prefill that are captured; a longer one is cut into chunks of 512.
PREFILL_SHAPES = [16, 64, 160, 512]
CAPTURED = ("prefill shapes captured", "EXTEND forward by graph")
FA3_REPEATABLE = {"attention_backend": "fa3", "enable_deterministic_inference": True}
NO_RAGGED = {"flashinfer_mla_disable_ragged": True}

MODES: dict[str, Mode] = {
    # Prefill and decode on two streams with SMs of their own. Of the models with MLA, SGLang 0.5.15.post1
    # cuts only Sarvam's prefill into layers (`forward_split_prefill`).
    "pdmux": Mode(
        {
            "enable_pdmux": True,
            "pdmux_config_path": "PDMUX",
            "chunked_prefill_size": -1,
            "load_format": "dummy",
            **NO_RAGGED,
        },
        (
            "SPLIT_PREFILL forward",
            "DECODE forward by graph",
            "prefill and decode: streams apart",
            "prefill queued while a decode ran",
        ),
        faults=("seeded_dummy_weights", "multiplexing_starts"),
        model="split",
        repeats=True,
        fast=True,
        mixed=True,
    ),
    # torch.compile cuts the model at its attention, which runs between the graphs.
    "tc_prefill": Mode(
        {"cuda_graph_backend_prefill": "tc_piecewise", "cuda_graph_bs_prefill": PREFILL_SHAPES}, CAPTURED
    ),
    # Graphs that break at attention, without torch.compile.
    "breakable_prefill": Mode(
        {
            "cuda_graph_backend_prefill": "breakable",
            "cuda_graph_bs_prefill": PREFILL_SHAPES,
            **NO_RAGGED,
        },
        CAPTURED,
    ),
    # A prefill captured whole, attention and all. With MLA only fa3 has the metadata for it, and only
    # deterministic inference makes DeepSeek's layers attend to the latent rows there.
    "full_prefill": Mode(
        {
            "cuda_graph_config": {
                "prefill": {"backend": "full", "bs": PREFILL_SHAPES, "full_prefill_max_req": 4}
            },
            **FA3_REPEATABLE,
        },
        (*CAPTURED, "EXTEND attention captured"),
    ),
    # Requests that decode ride along in a chunk of another's prefill.
    "mixed_chunk": Mode(
        {"enable_mixed_chunk": True, "chunked_prefill_size": 128},
        ("MIXED forward",),
        repeats=True,
        mixed=True,
    ),
    # The pool is too small for what is asked: rows go to the host and come back.
    "hicache": Mode(
        {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 8192},
        ("rows loaded back",),
        then="evict",
        repeats=True,
    ),
    # Beside it: new weights in a server that runs.
    "no_radix": Mode({"disable_radix_cache": True}, ("weights updated",), then="update"),
    # Pool, weights and graphs give their memory back and take it again.
    "saver": Mode(
        {"enable_memory_saver": True},
        ("bytes released", "weights updated"),
        env={"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"},
        then="release",
        alone=True,
    ),
}
