"""Which slots does a step read? Described by tensors on the device that the host never reads."""

import itertools
from dataclasses import dataclass

import torch

from kvlab.errors import BadInput
from kvlab.kernels.checks import INDEX_DTYPES, described, expect


@dataclass(frozen=True)
class ActiveSlots:
    """The slots that one attention call reads, as its kernel reads them.

    Two layouts, the two that SGLang hands to its MLA kernels:

    - ragged (flashinfer_mla): `table` is `kv_indices`, int32 or int64 [capacity], one slot a token;
      `bounds` is `kv_indptr`, int32 [bs + 1] from 0, never falling. Request b reads
      `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`; casts take the whole prefix. Under CUDA graphs the buffer
      is static: only the prefix `kv_indptr[bs]` is valid and a stale tail follows.
    - paged (fa3): `table` is `page_table`, int32 [bs, pages] of page ids; `bounds` is `lengths`, int32 [bs],
      in tokens. Request b reads positions 0 … lengths[b] - 1; position p is slot
      `page_table[b, p // page_size] * page_size + p % page_size`. What follows the last page is stale or -1.

    An entry that is negative or past the pool is no slot: casts leave it alone and attention masks it.
    Both tensors may be refilled in place between calls (CUDA-graph replay does); shapes stay.
    """

    table: torch.Tensor
    bounds: torch.Tensor
    page_size: int = 1
    is_paged: bool = False

    @classmethod
    def ragged(cls, kv_indices: torch.Tensor, kv_indptr: torch.Tensor) -> "ActiveSlots":
        """Token-level slots. `kv_indices` int32 or int64 [capacity]; `kv_indptr` int32 [bs + 1], from 0."""
        expect("kv_indices", kv_indices, "[capacity]", dims=1, dtypes=INDEX_DTYPES)
        expect("kv_indptr", kv_indptr, "[bs + 1]", dims=1, dtypes=(torch.int32,), device=kv_indices.device)
        if kv_indptr.numel() < 1:
            raise BadInput("kv_indptr: expected int32 [bs + 1], which has at least one entry, got [0]")
        return cls(kv_indices, kv_indptr)

    @classmethod
    def paged(cls, page_table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> "ActiveSlots":
        """Pages. `page_table` int32 [bs, pages], row stride free; `lengths` int32 [bs] in tokens."""
        if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
            raise BadInput(f"page_size: expected a whole number of tokens, 1 or more, got {page_size!r}")
        expect("page_table", page_table, "[bs, pages]", dims=2, dtypes=(torch.int32,))
        expect(
            "lengths",
            lengths,
            f"[{page_table.shape[0]}], one entry a row of page_table",
            dtypes=(torch.int32,),
            device=page_table.device,
            sizes=(page_table.shape[0],),
        )
        return cls(page_table, lengths, page_size, True)

    @property
    def batch(self) -> int:
        """Requests, padded ones included."""
        return self.bounds.numel() if self.is_paged else self.bounds.numel() - 1

    @property
    def capacity(self) -> int:
        """The most tokens that the tensors can name, whatever they hold."""
        return self.table.numel() * self.page_size

    @property
    def device(self) -> torch.device:
        return self.table.device

    def entries(self) -> list[torch.Tensor]:
        """Each request's valid table entries (slots, or page ids when paged), int64. Reads the device."""
        bounds = self.bounds.tolist()
        if self.is_paged:
            pages = [min(-(-n // self.page_size), self.table.shape[1]) for n in bounds]
            return [row[: max(n, 0)].long() for row, n in zip(self.table, pages, strict=True)]
        return [self.table[a : max(a, b)].long() for a, b in itertools.pairwise(bounds)]

    def slots(self) -> list[torch.Tensor]:
        """Each request's slots in order, int64, -1 for a negative entry. Reads the device."""
        if not self.is_paged:
            return [e.clamp(min=-1) for e in self.entries()]
        found = []
        for pages, n in zip(self.entries(), self.bounds.tolist(), strict=True):
            offset = torch.arange(self.page_size, device=self.device)
            slots = torch.where(pages[:, None] < 0, -1, pages[:, None] * self.page_size + offset)
            found.append(slots.flatten()[: max(n, 0)])
        return found

    def distinct(self, num_slots: int) -> torch.Tensor:
        """The distinct slots of a pool of `num_slots`, sorted, int64. Reads the device."""
        every = self.slots()
        flat = torch.cat(every) if every else torch.empty(0, dtype=torch.long, device=self.device)
        return torch.unique(flat[(flat >= 0) & (flat < num_slots)])


def expect_active(active: ActiveSlots, device: torch.device | None, others: str = "") -> None:
    """Raise BadInput unless `active` is one, on `device` (None: any). `others`: what else it might be."""
    if not isinstance(active, ActiveSlots):
        raise BadInput(f"active: expected ActiveSlots{others}, got {described(active)}")
    if device is not None and active.device != device:
        raise BadInput(f"active: wrong device; expected tensors on {device}, got {described(active.table)}")
