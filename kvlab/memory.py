"""How many bytes, where? The KV pool of an MLA model, the casts of it, and what fits a card. Exact integers.

SGLang's side, read from the releases 0.5.9, 0.5.15.post1 and 0.5.23 (srt/mem_cache/memory_pool.py, the same
in all three unless said): a pool of `size` tokens is rounded down to whole pages; its arena has
`size + page_size` slots (slot 0 takes the writes of padded tokens); the DSA indexer's arena has
`(size + page_size + 1) // page_size` pages; and the log line divides by 2^30 and calls the result GB.
"""

from collections.abc import Callable, Sequence

import msgspec

from kvlab.errors import BadInput
from kvlab.gpus import Gpu
from kvlab.models import MlaGeometry, Rank, rank
from kvlab.units import GIB

# The dtype that attention reads: `.to(q.dtype)` gives BF16, or FP16 with `--dtype float16`; two bytes each.
COMPUTE_BYTES = 2
_FP4_BLOCK = 16
_DSA_BLOCK = 128


class KvDtype(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool stores one token's row in one layer.

    `row_bytes` is what is allocated; `logged_row_bytes` what SGLang's log line counts of it (FP4 leaves its
    scales out); `casts` says whether attention converts the pool before it reads it.
    """

    name: str
    title: str
    row_bytes: Callable[[MlaGeometry], int]
    logged_row_bytes: Callable[[MlaGeometry], int]
    casts: bool
    aliases: tuple[str, ...] = ()


def _plain(geometry: MlaGeometry) -> int:
    return geometry.latent_dim


def _double(geometry: MlaGeometry) -> int:
    return 2 * geometry.latent_dim


def _dsa(geometry: MlaGeometry) -> int:
    """FP8 latent, an FP32 scale for each 128 of it, BF16 rope part: 512 + 16 + 128 = 656 bytes.

    SGLang's calculate_mla_kv_cache_dim.
    """
    if not geometry.has_indexer:
        raise BadInput(
            f"--dtype fp8_dsa: {geometry.name} has no DSA, and the scaled row is for DSA; use fp8_e4m3"
        )
    if geometry.kv_lora_rank % _DSA_BLOCK:
        raise BadInput(
            f"--dtype fp8_dsa: kv_lora_rank {geometry.kv_lora_rank} of {geometry.name} must be a multiple of "
            f"{_DSA_BLOCK}"
        )
    return geometry.kv_lora_rank + geometry.kv_lora_rank // _DSA_BLOCK * 4 + 2 * geometry.qk_rope_head_dim


def _fp4(geometry: MlaGeometry) -> int:
    return geometry.latent_dim // 2


def _fp4_with_scales(geometry: MlaGeometry) -> int:
    """Two values a byte and a byte of scale for each 16 values (MLATokenToKVPoolFP4)."""
    return geometry.latent_dim // 2 + geometry.latent_dim // _FP4_BLOCK


DTYPES: dict[str, KvDtype] = {
    d.name: d
    for d in (
        KvDtype(
            name="fp8_e4m3",
            title="FP8 e4m3, unscaled",
            row_bytes=_plain,
            logged_row_bytes=_plain,
            casts=True,
            aliases=("fp8", "e4m3", "float8_e4m3fn"),
        ),
        KvDtype(
            name="fp8_e5m2",
            title="FP8 e5m2, unscaled",
            row_bytes=_plain,
            logged_row_bytes=_plain,
            casts=True,
            aliases=("e5m2", "float8_e5m2"),
        ),
        KvDtype(
            name="bf16",
            title="BF16",
            row_bytes=_double,
            logged_row_bytes=_double,
            casts=False,
            aliases=("bfloat16", "fp16", "float16"),
        ),
        KvDtype(
            name="fp8_dsa",
            title="FP8 with block scales and a BF16 rope part (DSA)",
            row_bytes=_dsa,
            logged_row_bytes=_dsa,
            casts=True,
            aliases=("dsa", "fp8_ds_mla"),
        ),
        KvDtype(
            name="fp4",
            title="block FP4 with a scale for each 16 values",
            row_bytes=_fp4_with_scales,
            logged_row_bytes=_fp4,
            casts=True,
            aliases=("fp4_e2m1", "nvfp4", "mxfp4"),
        ),
    )
}


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's KV pool. `slots` are tokens, as SGLang's `#tokens` and --max-total-tokens count them.

    `indexer` counts the DSA indexer's rows too, `draft_layers` MTP layers (their own pool with as many
    slots). `skip_shared_indexers`: layers that reuse an earlier layer's top-k get no indexer rows; SGLang
    does so in 0.5.23 and did not through 0.5.15.post1.
    """

    rank: Rank
    slots: int
    dtype: KvDtype
    page_size: int = 1
    indexer: bool = False
    draft_layers: int = 0
    skip_shared_indexers: bool = False

    @property
    def geometry(self) -> MlaGeometry:
        return self.rank.geometry

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row in one layer."""
        return self.dtype.row_bytes(self.geometry)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's rows, without padding slots."""
        return self.slots * self.row_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of all layers' rows, without padding slots."""
        return self.layer_bytes * self.rank.layers

    @property
    def indexer_layers(self) -> int:
        """Layers that have indexer rows."""
        if not self.indexer:
            return 0
        return self.rank.full_indexer_layers if self.skip_shared_indexers else self.rank.layers

    @property
    def indexer_bytes(self) -> int:
        """Bytes of the indexer's rows, without padding; 0 when the indexer is not counted."""
        return self.slots * self.geometry.indexer_row_bytes * self.indexer_layers

    @property
    def draft_bytes(self) -> int:
        """Bytes of the MTP draft layers' rows and, if counted, their indexer rows, without padding."""
        indexer = self.geometry.indexer_row_bytes if self.indexer else 0
        return self.slots * (self.row_bytes + indexer) * self.draft_layers

    @property
    def one_layer_shadow_bytes(self) -> int:
        """Bytes of one layer's rows in the compute dtype, the result of one full cast.

        0 if nothing is cast.
        """
        return self.slots * self._compute_row_bytes

    @property
    def shadow_bytes(self) -> int:
        """Bytes of a persistent copy of every layer in the compute dtype."""
        return self.one_layer_shadow_bytes * self.rank.layers

    @property
    def cast_traffic_bytes(self) -> int:
        """Bytes that one full cast of one layer moves: each row read once, its conversion written once."""
        return self.slots * (self.row_bytes + self._compute_row_bytes) if self.dtype.casts else 0

    @property
    def tokens(self) -> int:
        """`#tokens` in SGLang's log: the slots, rounded down to whole pages."""
        return self.slots // self.page_size * self.page_size

    @property
    def allocated_bytes(self) -> int:
        """Bytes that SGLang allocates.

        With padding slots, whole indexer pages, FP4 scales and draft layers.
        """
        return self._arena(self.row_bytes, self.rank.layers, self.indexer_layers) + self._arena(
            self.row_bytes, self.draft_layers, self.draft_layers if self.indexer else 0
        )

    @property
    def logged_bytes(self) -> int:
        """Bytes in SGLang's "KV size": the target's pool and its indexer, no FP4 scales, no draft layers."""
        return self._arena(self.dtype.logged_row_bytes(self.geometry), self.rank.layers, self.indexer_layers)

    @property
    def sglang_logs_gb(self) -> float:
        """`KV size: … GB` as SGLang prints it: GiB to two decimals."""
        return float(f"{self.logged_bytes / GIB:.2f}")

    @property
    def stock_cast_bytes(self) -> int:
        """Bytes that stock holds at once for its cast: one layer of the arena, padding slots included."""
        return (self.tokens + self.page_size) * self._compute_row_bytes

    @property
    def full_shadow_bytes(self) -> int:
        """Bytes of a persistent shadow of the whole arena, padding slots included."""
        return self.stock_cast_bytes * self.rank.layers

    def active_bytes(self, active: int) -> int:
        """Bytes of `active` rows in one layer."""
        return active * self.row_bytes

    def active_traffic_bytes(self, active: int) -> int:
        """Bytes that a cast of `active` rows of one layer moves."""
        return active * (self.row_bytes + self._compute_row_bytes) if self.dtype.casts else 0

    @property
    def _compute_row_bytes(self) -> int:
        return self.geometry.latent_dim * COMPUTE_BYTES if self.dtype.casts else 0

    def _arena(self, row_bytes: int, layers: int, indexer_layers: int) -> int:
        rows = (self.tokens + self.page_size) * row_bytes * layers
        pages = (self.tokens + self.page_size + 1) // self.page_size
        return rows + pages * self.page_size * self.geometry.indexer_row_bytes * indexer_layers


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether weights, pool and a copy for the cast fit a card; None where weights or card are unknown.

    `fits` counts a persistent shadow of every layer, `fits_stock` the one layer that stock casts at a time.
    `needed` and `needed_stock` are the sums, `largest` and `largest_stock` the most slots that fit, in whole
    pages. Activations, CUDA context and captured graphs come on top and are in a sum only as `reserve`.
    """

    capacity: int | None
    weights: int | None
    reserve: int
    needed: int | None
    needed_stock: int | None
    fits: bool | None
    fits_stock: bool | None
    largest: int | None
    largest_stock: int | None
    unknown: tuple[str, ...]


def dtype(name: str) -> KvDtype:
    """A KV dtype by name or alias. Raises BadInput."""
    wanted = name.strip().lower()
    for known in DTYPES.values():
        if wanted in (known.name, *known.aliases):
            return known
    raise BadInput(f"--dtype: {name!r} is none of {', '.join(DTYPES)}")


def pool(
    geometry: MlaGeometry,
    slots: int,
    *,
    kv_dtype: str | KvDtype = "fp8_e4m3",
    page_size: int = 1,
    tp: int = 1,
    pp: int = 1,
    pp_rank: int | None = None,
    partition: Sequence[int] | None = None,
    indexer: bool = False,
    draft: bool = False,
    skip_shared_indexers: bool = False,
) -> Pool:
    """One rank's pool, checked. Raises BadInput naming the option of `kvlab memory` that is wrong."""
    if page_size < 1:
        raise BadInput(f"--page-size {page_size}: a page has at least 1 slot")
    if slots < 1:
        raise BadInput(f"--slots {slots}: a pool has at least 1 slot")
    if slots < page_size:
        raise BadInput(f"--slots {slots}: less than one page of {page_size} slots; give at least {page_size}")
    if slots > 10**100:
        raise BadInput("--slots: more than 10^100 slots are no pool")
    if indexer and not geometry.has_indexer:
        raise BadInput(f"--indexer: {geometry.name} has no DSA indexer (no index_topk in its config)")
    kv = dtype(kv_dtype) if isinstance(kv_dtype, str) else kv_dtype
    if indexer and kv.name == "fp4":
        raise BadInput("--indexer: SGLang has no FP4 pool for DSA models; use fp8_e4m3, fp8_dsa or bf16")
    if kv.name == "fp4" and geometry.latent_dim % _FP4_BLOCK:
        raise BadInput(f"--dtype fp4: a row of {geometry.latent_dim} values is no multiple of {_FP4_BLOCK}")
    if draft and not geometry.num_nextn_predict_layers:
        raise BadInput(f"--draft: {geometry.name} has no MTP layers (num_nextn_predict_layers); leave it out")
    made = Pool(
        rank=rank(geometry, tp=tp, pp=pp, pp_rank=pp_rank, partition=partition),
        slots=slots,
        dtype=kv,
        page_size=page_size,
        indexer=indexer,
        draft_layers=geometry.num_nextn_predict_layers if draft else 0,
        skip_shared_indexers=skip_shared_indexers,
    )
    _ = made.row_bytes  # A dtype that this model cannot have says so here.
    return made


def check_active(made: Pool, active: int) -> int:
    """`active` distinct slots of the pool, or BadInput. A prefix that requests share counts once."""
    if not 0 <= active <= made.slots:
        raise BadInput(f"--active {active}: it counts distinct slots of the pool, 0 to {made.slots}")
    return active


def fit(made: Pool, *, gpu: Gpu | None = None, weights: int | None = None, reserve: int = 0) -> Fit:
    """Do `weights` bytes a rank, the pool and a copy for the cast fit `gpu`? None, and why, where unknown."""
    unknown = []
    if weights is None:
        unknown.append("the weights: give --weights, what one rank's take, e.g. 61GiB")
    if gpu is None:
        unknown.append("the card: give --gpu, e.g. rtx-pro-6000")
    if weights is None or gpu is None:
        return Fit(
            capacity=gpu.memory if gpu else None,
            weights=weights,
            reserve=reserve,
            needed=None,
            needed_stock=None,
            fits=None,
            fits_stock=None,
            largest=None,
            largest_stock=None,
            unknown=tuple(unknown),
        )
    base = weights + reserve
    needed = base + made.allocated_bytes + made.full_shadow_bytes
    needed_stock = base + made.allocated_bytes + made.stock_cast_bytes
    budget = gpu.memory - base
    return Fit(
        capacity=gpu.memory,
        weights=weights,
        reserve=reserve,
        needed=needed,
        needed_stock=needed_stock,
        fits=needed <= gpu.memory,
        fits_stock=needed_stock <= gpu.memory,
        largest=largest_pool(made, budget, full_shadow=True),
        largest_stock=largest_pool(made, budget, full_shadow=False),
        unknown=(),
    )


def largest_pool(made: Pool, budget: int, *, full_shadow: bool) -> int:
    """The most slots, in whole pages, whose pool and cast copy take at most `budget` bytes; 0 if none.

    The copy is of every layer (`full_shadow`) or of one.
    """

    def bytes_of(pages: int) -> int:
        it = msgspec.structs.replace(made, slots=pages * made.page_size)
        return it.allocated_bytes + (it.full_shadow_bytes if full_shadow else it.stock_cast_bytes)

    low, high = 0, 1
    while bytes_of(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_of(middle) <= budget else (low, middle)
    return low * made.page_size
