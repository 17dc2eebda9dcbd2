"""What a CPU lacks: flashinfer's MLA wrapper and FA3's paged attention, with their real contracts.

They attend in float64 over exactly what they are handed: the wide buffer, the plan's own lengths, the index
buffer or page table as it is at the call. An output therefore depends on every active row and on no other.

"As on a GPU": a plan copies host lengths where it must not see later changes, and a device tensor that the
real library keeps by reference is kept by reference here.
"""

import torch


def attend(q_nope, q_pe, ckv, kpe, slots, q_bounds, *, sm_scale, causal, logit_cap=0.0):
    """[tokens, heads, rank] float64 and lse [tokens, heads]; `slots`: int64, one tensor a request."""
    tokens, heads, rank = q_nope.shape
    out = torch.zeros(tokens, heads, rank, dtype=torch.float64)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    q = torch.cat([q_nope, q_pe], -1).double()
    for b, its in enumerate(slots):
        first, last = q_bounds[b], q_bounds[b + 1]
        n, length = last - first, len(its)
        if n == 0 or length == 0:
            continue
        v = ckv[its].double()
        k = torch.cat([v, kpe[its].double()], -1)
        logits = torch.einsum("nhd,ld->nhl", q[first:last], k) * sm_scale
        if logit_cap:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        if causal:
            end = length - n + torch.arange(n)
            logits = logits.masked_fill((torch.arange(length)[None] > end[:, None])[:, None], -torch.inf)
        lse[first:last] = torch.logsumexp(logits, -1)
        out[first:last] = torch.einsum("nhl,ld->nhd", torch.softmax(logits, -1), v)
    return out, lse


class _Module:
    """flashinfer's compiled module: `plan` freezes the lengths it is given on the host."""

    def __init__(self, wrapper):
        self.wrapper = wrapper

    def plan(self, _float, _int, _pinned, qo_indptr, kv_indptr, kv_len, heads, head_dim, causal, *rest):
        self.wrapper._frozen = (qo_indptr.tolist(), kv_indptr.tolist(), kv_len.tolist())
        return ()


class BatchMLAPagedAttentionWrapper:
    """flashinfer's wrapper: attributes, argument order and buffer ownership of 0.6.3 to 0.6.18."""

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self.device = float_workspace_buffer.device
        self.plans = 0

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        use_profiler=False,
    ):
        assert page_size == 1
        self._cached_module = _Module(self)
        self.plans += 1
        if self._use_cuda_graph:
            self._qo_indptr_buf.copy_(qo_indptr)
            self._kv_indptr_buf.copy_(kv_indptr)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
            self._kv_len_arr_buf.copy_(kv_len_arr)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device)
            self._kv_indptr_buf = kv_indptr.to(self.device)
            self._kv_indices_buf = kv_indices.to(self.device)
            self._kv_len_arr_buf = kv_len_arr.to(self.device)
        self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale
        self._kv_data_type = kv_data_type
        self._cached_module.plan(
            None, None, None, qo_indptr, kv_indptr, kv_len_arr, num_heads, head_dim_ckv, causal
        )

    def run(
        self,
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out=None,
        lse=None,
        return_lse=False,
        *,
        ckv_scale=None,
        kpe_scale=None,
    ):
        if ckv_cache.dtype != self._kv_data_type:
            raise ValueError(f"planned for {self._kv_data_type}, got {ckv_cache.dtype}")
        if ckv_cache.dtype == torch.float8_e4m3fn and (ckv_scale is None or kpe_scale is None):
            raise ValueError("ckv_scale and kpe_scale are required for FP8 rows")
        qo, kv, _ = self._frozen
        # The kernel reads lengths from the plan and slots from the buffer, as it is now.
        slots = [self._kv_indices_buf[kv[b] : kv[b + 1]].long() for b in range(len(kv) - 1)]
        got, its_lse = attend(
            q_nope,
            q_pe,
            ckv_cache.squeeze(1),
            kpe_cache.squeeze(1),
            slots,
            qo,
            sm_scale=self._sm_scale,
            causal=self._causal,
        )
        result = got.to(q_nope.dtype)
        if out is not None:
            result = out.copy_(result)
        return (result, its_lse.float()) if return_lse else result


class BatchPrefillWithRaggedKVCacheWrapper:
    """Constructed by the backend; prefill without a prefix uses it and reads no pool."""

    def __init__(self, *args, **kwargs):
        self.began = 0

    def begin_forward(self, **kwargs):
        self.began += 1

    def forward(self, q, k, v, **kwargs):
        return torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    qv=None,
    page_table=None,
    cache_seqlens=None,
    cu_seqlens_q=None,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    return_softmax_lse=False,
    **kwargs,
):
    """FA3 over pages: `k_cache` [pages, page_size, 1, rope], `v_cache` [pages, page_size, 1, rank]."""
    pages, page_size = k_cache.shape[:2]
    kpe = k_cache.reshape(pages * page_size, -1)
    ckv = v_cache.reshape(pages * page_size, -1)
    slots = []
    for b, n in enumerate(cache_seqlens.tolist()):
        position = torch.arange(n)
        slots.append(page_table[b].long()[position // page_size] * page_size + position % page_size)
    bounds = cu_seqlens_q.tolist()
    out, lse = attend(
        qv, q, ckv, kpe, slots, bounds, sm_scale=softmax_scale, causal=causal, logit_cap=softcap or 0.0
    )
    out = out.to(qv.dtype)
    return (out, lse.T.contiguous().float()) if return_softmax_lse else out


def merge_state_v2(o_a, lse_a, o_b, lse_b):
    """[tokens, heads, rank], [tokens, heads] twice -> merged."""
    top = torch.maximum(lse_a, lse_b)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    out = (o_a.double() * a[..., None] + o_b.double() * b[..., None]) / (a + b)[..., None]
    return out.to(o_a.dtype), top + torch.log(a + b)
