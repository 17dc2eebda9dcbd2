"""One call through the seam, on a backend of a few lines: nothing of it outlives the call."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.reference import mla_attention
from kvlab.patch.runtime import Runtime
from kvlab.patch.sites import RECOGNISED, Site
from kvlab.pool import LatentPool

RANK, ROPE, HEADS = 32, 16, 2
SITE = Site("flashinfer_mla", "decode", "here", "Backend", RECOGNISED, holder="self")
LAYER = SimpleNamespace(
    layer_id=0, tp_q_head_num=HEADS, head_dim=RANK + ROPE, v_head_dim=RANK, scaling=1.0, logit_cap=0.0
)


class Backend:
    """What the seam meets: a pool, the step's metadata, and the cast."""

    def __init__(self):
        self.token_to_kv_pool = LatentPool(5_000, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
        self.kv_indptr = torch.tensor([0, 7], dtype=torch.int32)
        wrapper = SimpleNamespace(
            _kv_indices_buf=torch.arange(3, 10, dtype=torch.int32),
            _kv_indptr_buf=self.kv_indptr,
            _use_cuda_graph=False,
        )
        self.forward_metadata = SimpleNamespace(decode_wrapper=wrapper)

    def forward_decode(self, q, k, v, layer, forward_batch):
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
        active = ActiveSlots.ragged(self.forward_metadata.decode_wrapper._kv_indices_buf, self.kv_indptr)
        return mla_attention(q[..., :RANK], q[..., RANK:], rows, active, sm_scale=layer.scaling)[0]


@pytest.mark.parametrize("strategy", ["stock", "shadow", "gather"])
def test_a_call_leaves_nothing_to_the_garbage_collector(strategy):
    backend, runtime = Backend(), Runtime(strategy, is_strict=False, version=None)

    def one_call():
        q = torch.ones(1, HEADS, RANK + ROPE, dtype=torch.bfloat16)
        batch = SimpleNamespace(seq_lens_sum=7)
        runtime.call(SITE, Backend.forward_decode, backend, q, None, None, LAYER, batch)
        return weakref.ref(q)

    one_call()
    gc.collect()
    gc.disable()
    try:
        q = one_call()
        assert q() is None
    finally:
        gc.enable()
    assert runtime.counters.as_dict()["calls"] == {"flashinfer_mla.decode": {strategy: 2}}
