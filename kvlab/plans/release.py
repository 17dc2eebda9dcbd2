"""A decode step of released code on a CPU: SGLang's MLA backend and flashinfer's wrapper, run from source.

The Python is the releases' own (`kvlab.backends.sources`): `plan`, `run`, `fast_mla_decode_plan`, the hooks
of capture and replay, `forward_decode`. Stand-ins take the place of what needs a GPU: flashinfer's compiled
kernel, and the Triton kernel that copies slots out of the request table. Attention is float32
(`kvlab.kernels.reference`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvlab.backends.sources import Tree
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.reference import mla_attention
from kvlab.pool import LatentPool

BACKEND = "sglang/srt/layers/attention/flashinfer_mla_backend.py"
WRAPPER = "flashinfer/mla.py"
RANK, ROPE = 512, 64


class OnCPU(TorchFunctionMode):
    """`device="cuda"` literals become the CPU, pinned memory ordinary memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        given.pop("pin_memory", None)
        return func(*args, **given)


class Kernel:
    """flashinfer's compiled module: `plan` writes the lengths into the integer workspace, `run` reads them.

    So it is on a GPU: a schedule made from host lengths lies in device memory, at an address that a captured
    graph keeps, and the slots come with each call.
    """

    def __init__(self) -> None:
        self.plans = 0
        self.past_the_end = 0

    def plan(
        self,
        floats: Any,
        ints: torch.Tensor,
        pinned: Any,
        qo: torch.Tensor,
        kv: torch.Tensor,
        lengths: torch.Tensor,
        *rest: Any,
    ) -> list[int]:
        self.plans += 1
        words = ints.view(torch.int32)
        batch = len(lengths)
        words[0] = batch
        words[1 : batch + 2] = qo
        words[batch + 2 : 2 * batch + 3] = kv
        return [0]

    def run(
        self,
        floats: Any,
        ints: torch.Tensor,
        plan_info: Any,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        kv_indices: torch.Tensor,
        out: torch.Tensor,
        lse: Any,
        mask_mode: int,
        heads: int,
        page_size: int,
        sm_scale: float,
        *rest: Any,
    ) -> None:
        words = ints.view(torch.int32)
        batch = int(words[0])
        qo, kv = words[1 : batch + 2].clone(), words[batch + 2 : 2 * batch + 3].clone()
        active = ActiveSlots.ragged(kv_indices, kv)
        # The reference masks what lies outside; a GPU's kernel would read there.
        read = kv_indices[: int(kv[-1])]
        self.past_the_end += int((read >= ckv.shape[0]).sum())
        rows = torch.cat([ckv, kpe], dim=-1)
        found, _ = mla_attention(q_nope, q_pe, rows, active, sm_scale=sm_scale, q_indptr=qo, causal=False)
        out.copy_(found)


class _Indices:
    """SGLang's Triton kernel `create_flashinfer_kv_indices_triton`: one program a request."""

    def __getitem__(self, grid: Any) -> Any:
        return self._run

    def _run(
        self,
        table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        indptr: torch.Tensor,
        start: Any,
        out: torch.Tensor,
        *rest: Any,
    ) -> None:
        for b, row in enumerate(rows.tolist()):
            first, last = int(indptr[b]), int(indptr[b + 1])
            out[first:last] = table[row, : last - first]


class Pool(LatentPool):
    """SGLang's signature of the KV write."""

    def set_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor
    ) -> None:
        super().set_mla_kv_buffer(layer.layer_id, loc, torch.cat([nope, rope], dim=-1).flatten(1))


class Server:
    """One backend of a release over a small pool."""

    def __init__(
        self,
        sglang: Tree,
        flashinfer: Tree,
        *,
        slots: int,
        requests: Sequence[Sequence[int]],
        layers: int = 2,
        heads: int = 4,
        seed: int = 0,
    ) -> None:
        """`requests`: the slots of each request, in order; row b of the request table holds those of b."""
        self.draw = torch.Generator().manual_seed(seed)
        self.heads, self.batch = heads, len(requests)
        self.pool = Pool(slots, layers=layers, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
        for buffer in self.pool.kv_buffer:
            latent = torch.randn(tuple(buffer.shape), generator=self.draw)
            buffer.copy_(latent.to(self.pool.dtype).view(torch.uint8))
        longest = max(map(len, requests))
        self.table = torch.zeros((self.batch, longest), dtype=torch.int32)
        for b, its in enumerate(requests):
            self.table[b, : len(its)] = torch.tensor(its, dtype=torch.int32)
        self.kernels: list[Kernel] = []
        self.classes = self._compiled(sglang, flashinfer)
        self.backend = self._backend(longest)
        q = torch.randn(layers, self.batch, heads, RANK + ROPE, generator=self.draw).to(torch.bfloat16)
        self.queries = [(layer[..., :RANK].contiguous(), layer[..., RANK:].contiguous()) for layer in q]
        self.layers = [
            SimpleNamespace(
                layer_id=i,
                tp_q_head_num=heads,
                head_dim=RANK + ROPE,
                v_head_dim=RANK,
                scaling=(RANK + ROPE) ** -0.5,
                logit_cap=0.0,
            )
            for i in range(layers)
        ]

    def _kernel(self, *_: Any) -> Kernel:
        self.kernels.append(Kernel())
        return self.kernels[-1]

    def _compiled(self, sglang: Tree, flashinfer: Tree) -> SimpleNamespace:
        utils = _module(flashinfer, "flashinfer/utils.py")
        wrapper = _module(flashinfer, WRAPPER).real_class(
            "BatchMLAPagedAttentionWrapper",
            {
                "torch": torch,
                "get_batch_mla_module": self._kernel,
                "determine_mla_backend": lambda device: "fa2",
                "check_shape_dtype_device": utils.real("check_shape_dtype_device", {"torch": torch}),
                "MaskMode": SimpleNamespace(
                    CAUSAL=SimpleNamespace(value=1), NON_CAUSAL=SimpleNamespace(value=0)
                ),
                # Only overloads and the decorators are dropped from the class; these name them.
                "overload": lambda f: f,
                "flashinfer_api": lambda f: f,
            },
        )
        backend = _module(sglang, BACKEND)
        scope: dict[str, Any] = {
            "torch": torch,
            "partial": functools.partial,
            "AttentionBackend": object,
            "BatchMLAPagedAttentionWrapper": wrapper,
            "DecodeMetadata": lambda decode_wrapper: SimpleNamespace(decode_wrapper=decode_wrapper),
            "create_flashinfer_kv_indices_triton": _Indices(),
            "get_attention_tp_size": lambda: 1,
        }
        scope["fast_mla_decode_plan"] = backend.real("fast_mla_decode_plan", scope)
        return SimpleNamespace(
            wrapper=wrapper,
            backend=backend.real_class("FlashInferMLAAttnBackend", scope),
            updater=backend.real_class("FlashInferMLAIndicesUpdaterDecode", scope),
        )

    def _backend(self, context: int) -> Any:
        # The constructor asks a model runner for a GPU's workspace; the hooks read what follows.
        backend = object.__new__(self.classes.backend)
        backend.device = torch.device("cpu")
        backend.max_context_len = context
        backend.workspace_buffer = torch.zeros(1, dtype=torch.uint8)
        backend.kv_indptr = torch.zeros(self.batch + 1, dtype=torch.int32)
        backend.q_indptr_decode = torch.arange(self.batch + 1, dtype=torch.int32)
        backend.decode_cuda_graph_metadata = {}
        backend.forward_metadata = None
        config = SimpleNamespace(
            num_attention_heads=self.heads,
            kv_lora_rank=RANK,
            qk_nope_head_dim=RANK,
            qk_rope_head_dim=ROPE,
            scaling=(RANK + ROPE) ** -0.5,
        )
        runner = SimpleNamespace(
            model_config=config,
            dtype=torch.bfloat16,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )
        backend.indices_updater_decode = self.classes.updater(runner, backend)
        return backend

    @property
    def wrapper(self) -> Any:
        return self.backend.forward_metadata.decode_wrapper

    def eager(self, lengths: Sequence[int]) -> None:
        """What `init_forward_metadata` does for a decode batch: an eager wrapper and a full plan."""
        with OnCPU():
            wrapper = self.classes.wrapper(self.backend.workspace_buffer, backend="auto")
            self.backend.indices_updater_decode.update(
                *self._asked(lengths), decode_wrapper=wrapper, init_metadata_replay=False
            )
        self.backend.forward_metadata = SimpleNamespace(decode_wrapper=wrapper)

    def capture(self, lengths: Sequence[int], *, aliased: bool = False) -> None:
        """The release's own hooks for capturing a decode graph.

        `aliased`: keep what `.to("cpu")` gives on a CPU, the very same memory; from a GPU it is a copy.
        """
        b = self.backend
        with OnCPU():
            b.init_cuda_graph_state(self.batch, self.batch)
            if not aliased:
                for name in ("qo_indptr", "kv_indptr"):
                    copy = getattr(b, f"cuda_graph_{name}_cpu").clone()
                    setattr(b, f"cuda_graph_{name}_cpu", copy)
                    b.fast_decode_kwargs[f"{name}_cpu"] = copy
            rows, seq_lens, _ = self._asked(lengths)
            b.init_forward_metadata_capture_cuda_graph(
                self.batch, self.batch, rows, seq_lens, None, _Decode(), None
            )

    def replay(self, lengths: Sequence[int]) -> None:
        """The release's own hook before a replay. A captured graph's Python does not run again."""
        rows, seq_lens, total = self._asked(lengths)
        kept = self.backend.forward_metadata
        with OnCPU():
            self.backend.init_forward_metadata_replay_cuda_graph(
                self.batch, rows, seq_lens, total, None, _Decode(), None, seq_lens.clone()
            )
        self.backend.forward_metadata = kept

    def attend(self, through: Any = None, *, save: bool = False) -> list[torch.Tensor]:
        """`forward_decode` of every layer, [batch, heads * rank] each; `through(original, …)` wraps it.

        Without `save` nothing new is written: the rows at hand are what is attended to.
        """
        original = self.classes.backend.forward_decode
        batch = SimpleNamespace(
            token_to_kv_pool=self.pool, out_cache_loc=self.table[:, 0].long(), seq_lens_sum=None
        )
        found = []
        for layer, (q, q_rope) in zip(self.layers, self.queries, strict=True):
            given = {"q_rope": q_rope.clone(), "k_rope": None, "save_kv_cache": save}
            call = (self.backend, q.clone(), None, None, layer, batch)
            found.append(through(original, *call, **given) if through else original(*call, **given))
        return found

    def plans(self) -> int:
        """Plans of the kernel so far."""
        return sum(k.plans for k in self.kernels)

    def _asked(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
        seq_lens = torch.tensor(lengths, dtype=torch.int64)
        return torch.arange(self.batch), seq_lens, int(seq_lens.sum())


class _Decode:
    """SGLang's ForwardMode.DECODE, as far as the hooks ask."""

    def is_decode_or_idle(self) -> bool:
        return True


def _module(tree: Tree, path: str) -> Any:
    found = tree.module(path)
    if found is None:
        raise LookupError(f"{tree.package} {tree.release} has no {path}")
    return found
