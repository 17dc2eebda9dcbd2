"""Builds real SGLang objects of the installed release: pools, request tables, backends, batches."""

import contextlib
import dataclasses
import importlib
import types

import torch

from rig import environment, standins

RELEASE = environment.VERSION
OLD_HOOKS = RELEASE == "0.5.9"  # capture and replay are hooks of their own; the pool is on the batch
TRANSLATES = RELEASE == "0.5.23"  # kv_loc_plan, KVIndexTranslator

memory_pool = importlib.import_module("sglang.srt.mem_cache.memory_pool")
flashinfer_mla = importlib.import_module("sglang.srt.layers.attention.flashinfer_mla_backend")
fa3 = importlib.import_module("sglang.srt.layers.attention.flashattention_backend")
batch_info = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
RadixAttention = importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention
ForwardMode = batch_info.ForwardMode

for _name in ("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
    setattr(flashinfer_mla, _name, getattr(standins, _name))
fa3.flash_attn_with_kvcache = standins.flash_attn_with_kvcache
fa3.merge_state_v2 = standins.merge_state_v2
if hasattr(fa3, "merge_state_v2_wrapper"):
    fa3.merge_state_v2_wrapper = standins.merge_state_v2

_SERVER = types.SimpleNamespace(
    disaggregation_mode="null",
    disable_chunked_prefix_cache=True,
    # Extend goes through the pool, not through the ragged wrapper that reads none.
    flashinfer_mla_disable_ragged=True,
    page_size=1,
    kv_cache_dtype="fp8_e4m3",
    speculative_eagle_topk=None,
    speculative_num_draft_tokens=None,
    speculative_algorithm=None,
    enable_deterministic_inference=False,
    disable_cuda_graph=False,
    disable_radix_cache=False,
    enable_dp_attention=False,
    enable_pdmux=False,
    enable_prefill_cp=False,
    enable_piecewise_cuda_graph=False,
    is_embedding=False,
    enable_dp_lm_head=False,
    enable_two_batch_overlap=False,
    attention_backend="flashinfer",
    tp_size=1,
    dp_size=1,
    pp_size=1,
    dcp_size=1,
    port=30000,
    host="127.0.0.1",
    device="cpu",
)


def _prepare_globals():
    """The process-wide state that a scheduler would have set."""
    if RELEASE == "0.5.9":
        parallel = importlib.import_module("sglang.srt.distributed.parallel_state")
        parallel._ATTN_TP = types.SimpleNamespace(world_size=1, rank_in_group=0)
        importlib.import_module("sglang.srt.server_args")._global_server_args = _SERVER
        return
    context = importlib.import_module("sglang.srt.runtime_context")
    if RELEASE == "0.5.15.post1":
        context.get_context().set_server_args(_SERVER)
        sizes = ("tp_size", "attn_tp_size", "attn_cp_size", "pp_size", "attn_dp_size")
        # Kept for good: the override ends with its last reference.
        _SERVER.one_rank = context.get_parallel().override(**dict.fromkeys(sizes, 1))
        _SERVER.one_rank.__enter__()
        return
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs(
        model_path="dummy",
        device="cpu",
        flashinfer_mla_disable_ragged=True,
        disable_chunked_prefix_cache=True,
        kv_cache_dtype="fp8_e4m3",
    )
    context.publish(arguments, role="test", ranks=context.SpawnRanks(world_rank=0, dp_rank=None))


_prepare_globals()


@dataclasses.dataclass
class Shape:
    """A small MLA model: what a backend and a pool are built from."""

    layers: int = 2
    heads: int = 2
    rank: int = 32
    rope: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def width(self):
        return self.rank + self.rope


class World:
    """One real backend on one real pool with real request tables."""

    def __init__(
        self,
        family,
        fp8=torch.float8_e4m3fn,
        *,
        slots=512,
        page_size=1,
        max_bs=8,
        context=128,
        shape=None,
        pool=None,
        topk=0,
        speculative_num_steps=0,
        skip_prefill=False,
        num_draft_tokens=None,
        seed=0,
    ):
        self.family, self.page_size, self.shape = family, page_size, shape or Shape()
        self.max_bs, self.context, self.topk = max_bs, context, topk
        self.generator = torch.Generator().manual_seed(seed)
        with environment.OnCPU():
            self.pool = pool or make_pool(fp8, slots=slots, page_size=page_size, shape=self.shape)
            self.requests = memory_pool.ReqToTokenPool(
                size=max_bs, max_context_len=context, device="cpu", enable_memory_saver=False
            )
            self.runner = self._runner(fp8, num_draft_tokens)
            self.backend = self._backend(skip_prefill, speculative_num_steps, num_draft_tokens)
        s = self.shape
        self.layers = [
            RadixAttention(s.heads, s.width, s.width**-0.5, 1, layer_id=i, v_head_dim=s.rank)
            for i in range(s.layers)
        ]
        self.slots = self.pool.kv_buffer[0].shape[0]
        # Slot 0 is padding; pages are dealt out whole.
        self._free = torch.randperm(self.slots // page_size - 1, generator=self.generator) + 1

    def _runner(self, fp8, num_draft_tokens):
        s = self.shape
        config = types.SimpleNamespace(
            context_len=self.context,
            num_attention_heads=s.heads,
            kv_lora_rank=s.rank,
            qk_nope_head_dim=s.rank,
            qk_rope_head_dim=s.rope,
            v_head_dim=s.rank,
            scaling=s.width**-0.5,
            head_dim=s.width,
            is_encoder_decoder=False,
            is_local_attention_model=False,
            attention_arch=importlib.import_module("sglang.srt.configs.model_config").AttentionArch.MLA,
            hf_text_config=types.SimpleNamespace(num_attention_heads=s.heads),
            get_num_kv_heads=lambda tp: 1,
        )
        server = types.SimpleNamespace(**vars(_SERVER))
        server.page_size = self.page_size
        # FA3 quantises queries of up to 256 values when the cache is FP8 by name. The real width, 576, is
        # past that; small test shapes must say "auto" to take the same path.
        server.kv_cache_dtype = "auto" if s.width <= 256 else _SERVER.kv_cache_dtype
        server.speculative_eagle_topk = self.topk
        server.speculative_num_draft_tokens = num_draft_tokens
        runner = types.SimpleNamespace(
            model_config=config,
            server_args=server,
            device="cpu",
            dtype=s.dtype,
            kv_cache_dtype=fp8,
            kv_cache_dtype_str=server.kv_cache_dtype,
            page_size=self.page_size,
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=types.SimpleNamespace(),
            sliding_window_size=None,
            attention_chunk_size=None,
            attn_cp_size=1,
            tp_size=1,
            tp_rank=0,
            gpu_id=0,
            is_draft_worker=False,
        )
        if TRANSLATES:
            translator = importlib.import_module("sglang.srt.mem_cache.kv_index_translator")
            runner.kv_index_translator = translator.KVIndexTranslator(
                req_to_token=self.requests.req_to_token,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
                token_to_kv_pool=self.pool,
                page_size=self.page_size,
                device="cpu",
            )
        return runner

    def _backend(self, skip_prefill, steps, num_draft_tokens):
        if self.family == "flashinfer_mla":
            return flashinfer_mla.FlashInferMLAAttnBackend(self.runner, skip_prefill=skip_prefill)
        backend = fa3.FlashAttentionBackend(self.runner, speculative_num_steps=steps)
        if hasattr(backend, "flash_attn_with_kvcache"):
            backend.flash_attn_with_kvcache = standins.flash_attn_with_kvcache
        # Newer releases take these from the process-wide configuration.
        backend.topk, backend.speculative_num_draft_tokens = self.topk, num_draft_tokens
        return backend

    def fill(self, *, nan=False):
        """Every byte of every layer random; without NaN and Inf codes unless asked."""
        for buffer in self.pool.kv_buffer:
            codes = torch.randint(0, 256, tuple(buffer.shape), generator=self.generator, dtype=torch.int64)
            # Both formats keep NaN and Inf in the top of the magnitudes.
            top = 0x7B if self.pool.dtype == torch.float8_e5m2 else 0x7E
            if not nan:
                magnitude = (codes & 0x7F).clamp(max=top)
                # Large exponents would let one row win the softmax everywhere: keep the values near one.
                keep = magnitude % (0x44 if self.pool.dtype == torch.float8_e5m2 else 0x48)
                codes = (codes & 0x80) | keep
            buffer.copy_(codes.to(torch.uint8))
        return self

    def allot(self, request, length):
        """Give request row `request` slots for `length` tokens; returns them."""
        pages = -(-length // self.page_size)
        mine, self._free = self._free[:pages], self._free[pages:]
        assert len(mine) == pages, "the pool is too small for this test"
        slots = (mine[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:length]
        self.requests.req_to_token[request, :length] = slots.to(torch.int32)
        return slots

    def share(self, request, other, length):
        """Request `request` begins with the same `length` slots as `other`."""
        table = self.requests.req_to_token
        table[request, :length] = table[other, :length]

    def batch(self, mode, lengths, *, prefix=None, requests=None, spec_info=None):
        """A real ForwardBatch of `lengths` cached tokens; the last ones are new (decode: 1, extend: rest)."""
        bs = len(lengths)
        rows = torch.arange(bs) if requests is None else torch.as_tensor(requests)
        seq_lens = torch.as_tensor(lengths, dtype=torch.int64)
        prefix = [n - 1 for n in lengths] if prefix is None else prefix
        table = self.requests.req_to_token
        new = [table[r, p:n] for r, p, n in zip(rows.tolist(), prefix, lengths, strict=True)]
        out = torch.cat([*new, table.new_empty(0)]).long()
        values = {
            "forward_mode": mode,
            "batch_size": bs,
            "input_ids": torch.zeros(len(out), dtype=torch.int64),
            "req_pool_indices": rows.long(),
            "seq_lens": seq_lens,
            "out_cache_loc": out,
            "seq_lens_sum": int(seq_lens.sum()),
            "seq_lens_cpu": seq_lens.clone(),
            "positions": torch.zeros(len(out), dtype=torch.int64),
            "extend_prefix_lens": torch.as_tensor(prefix, dtype=torch.int64),
            "extend_prefix_lens_cpu": list(prefix),
            "extend_seq_lens": seq_lens - torch.as_tensor(prefix, dtype=torch.int64),
            "extend_seq_lens_cpu": [n - p for n, p in zip(lengths, prefix, strict=True)],
            "extend_num_tokens": len(out),
            "req_to_token_pool": self.requests,
            "token_to_kv_pool": self.pool,
            "attn_backend": self.backend,
            "spec_info": spec_info,
        }
        known = {f.name for f in dataclasses.fields(batch_info.ForwardBatch)}
        batch = batch_info.ForwardBatch(**{k: v for k, v in values.items() if k in known})
        if TRANSLATES:
            self.runner.kv_index_translator.own_plan(batch)
        return batch

    def verify_batch(self, lengths, draft_tokens, *, kind="eagle", requests=None):
        """Target-verify: `lengths` committed tokens a request, `draft_tokens` more to be checked."""
        rows = torch.arange(len(lengths)) if requests is None else torch.as_tensor(requests)
        whole = [n + draft_tokens for n in lengths]
        batch = self.batch(ForwardMode.TARGET_VERIFY, whole, prefix=lengths, requests=rows)
        committed = torch.as_tensor(lengths, dtype=torch.int64)
        batch.spec_info = verify_input(kind, draft_tokens, committed, max(self.topk, 1), batch)
        batch.seq_lens = committed
        batch.seq_lens_sum = int(committed.sum())
        batch.seq_lens_cpu = torch.as_tensor(whole) if kind == "dflash" else committed.clone()
        return batch

    def tensors(self, batch, tokens=None):
        """Random (q_nope, q_rope, k_nope, k_rope) for the batch's new tokens."""
        s = self.shape
        n = len(batch.out_cache_loc) if tokens is None else tokens

        def make(*size):
            return torch.randn(size, generator=self.generator).to(s.dtype)

        return make(n, s.heads, s.rank), make(n, s.heads, s.rope), make(n, 1, s.rank), make(n, 1, s.rope)

    def plan(self, batch):
        """Eager metadata."""
        with environment.OnCPU():
            self.backend.init_forward_metadata(batch)

    def attend(self, batch, kind, tensors, layer=0, *, save=True):
        """`forward_decode` or `forward_extend` of one layer."""
        q, q_rope, k, k_rope = tensors
        forward = getattr(self.backend, f"forward_{kind}")
        with environment.OnCPU():
            return forward(
                q.clone(),
                k,
                k,
                self.layers[layer],
                batch,
                save_kv_cache=save,
                q_rope=q_rope.clone(),
                k_rope=k_rope,
            )

    def graphs(self, max_bs=None):
        """Static buffers for capture, de-aliased as a GPU's are: `.to("cpu")` copies there."""
        max_bs = max_bs or self.max_bs
        with environment.OnCPU():
            self.backend.init_cuda_graph_state(max_bs, max_bs * 4)
        b = self.backend
        if self.family == "flashinfer_mla":
            b.cuda_graph_qo_indptr_cpu = b.cuda_graph_qo_indptr_cpu.clone()
            b.cuda_graph_kv_indptr_cpu = b.cuda_graph_kv_indptr_cpu.clone()
            b.fast_decode_kwargs["qo_indptr_cpu"] = b.cuda_graph_qo_indptr_cpu
            b.fast_decode_kwargs["kv_indptr_cpu"] = b.cuda_graph_kv_indptr_cpu

    def capture(self, batch):
        """The metadata of a capture."""
        with environment.OnCPU():
            if OLD_HOOKS:
                self.backend.init_forward_metadata_capture_cuda_graph(
                    batch.batch_size,
                    len(batch.out_cache_loc),
                    batch.req_pool_indices,
                    batch.seq_lens,
                    None,
                    batch.forward_mode,
                    batch.spec_info,
                )
            else:
                self.backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def replay(self, batch):
        """The metadata of a replay. What the captured Python set stays: only buffers change."""
        kept = self.backend.forward_metadata
        with environment.OnCPU():
            if OLD_HOOKS:
                self.backend.init_forward_metadata_replay_cuda_graph(
                    batch.batch_size,
                    batch.req_pool_indices,
                    batch.seq_lens,
                    batch.seq_lens_sum,
                    None,
                    batch.forward_mode,
                    batch.spec_info,
                    batch.seq_lens_cpu,
                )
            else:
                self.backend.init_forward_metadata_out_graph(batch)
        # Nothing that Python binds now reaches a captured kernel.
        self.backend.forward_metadata = kept

    @contextlib.contextmanager
    def unpatched(self):
        """Stock's own methods, whatever is applied."""
        from kvlab.patch import api

        with contextlib.ExitStack() as stack:
            if api._patch is not None:
                was = api._patch.runtime.is_active
                api._patch.runtime.is_active = False
                stack.callback(setattr, api._patch.runtime, "is_active", was)
            yield


def verify_input(kind, draft_tokens, committed, topk, batch):
    """A real EagleVerifyInput or DFlashVerifyInput, as far as attention reads it."""
    if kind == "dflash":
        module = importlib.import_module("sglang.srt.speculative.dflash_info")
        return module.DFlashVerifyInput(
            draft_token=batch.input_ids, positions=batch.positions, draft_token_num=draft_tokens
        )
    cls = importlib.import_module("sglang.srt.speculative.eagle_info").EagleVerifyInput
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    values = dict.fromkeys(required)
    n, width = len(committed) * draft_tokens, int(committed.sum()) + len(committed) * draft_tokens
    values.update(
        custom_mask=torch.ones(width * draft_tokens, dtype=torch.bool),
        positions=torch.zeros(n, dtype=torch.int64),
        topk=topk,
        draft_token_num=draft_tokens,
        spec_steps=draft_tokens - 1,
        seq_lens_sum=int(committed.sum()),
        seq_lens_cpu=committed.clone(),
    )
    return cls(**values)


def make_pool(fp8, *, slots, page_size=1, shape=None, cls=None):
    """A real MLATokenToKVPool of `slots` slots, padding included."""
    s = shape or Shape()
    with environment.OnCPU():
        return (cls or memory_pool.MLATokenToKVPool)(
            size=slots - page_size,
            page_size=page_size,
            dtype=fp8,
            kv_lora_rank=s.rank,
            qk_rope_head_dim=s.rope,
            layer_num=s.layers,
            device="cpu",
            enable_memory_saver=False,
        )


def server_args(**changes):
    """The server's arguments with `changes`, for worlds built from now on."""
    for name, value in changes.items():
        setattr(_SERVER, name, value)
    return _SERVER
