"""What a busy server of stock SGLang may answer otherwise: two rows for the last token of a cached prompt.

A prompt that the radix cache holds is prefilled again for its last token, into a slot of its own. Once the
scheduler has taken the prefill's result it gives the request the tree's slot in its place. Where it overlaps,
the first decode step is launched before that: which of the two rows it reads is decided by who comes first.
"""

import importlib
import types

import pytest
import torch
from rig.world import RELEASE

if RELEASE not in ("0.5.9", "0.5.15.post1"):
    pytest.skip("requests of this release carry their slots otherwise", allow_module_level=True)

radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
params = importlib.import_module("sglang.srt.mem_cache.cache_init_params")

IDS = list(range(10, 16))


class Request(types.SimpleNamespace):
    def get_fill_ids(self):
        return self.fill_ids


def prefilled(tree, table, row, slots):
    """A request whose tokens `IDS` lie in `slots`, as a prefill leaves it: the tree holds none of it."""
    table[row, : len(IDS)] = torch.tensor(slots, dtype=table.dtype)
    return Request(
        req_pool_idx=row,
        fill_ids=IDS,
        extra_key=None,
        last_node=tree.root_node,
        prefix_indices=torch.empty(0, dtype=torch.int64),
        cache_protected_len=0,
        priority=0,
        session_id=None,
        session=None,
    )


def test_the_last_token_of_a_cached_prompt_changes_its_slot_when_its_prefill_is_taken():
    table = torch.zeros(4, 16, dtype=torch.int32)
    freed = []
    tree = radix.RadixCache(
        params.CacheInitParams(
            disable=False,
            req_to_token_pool=types.SimpleNamespace(req_to_token=table, write=table.__setitem__),
            token_to_kv_pool_allocator=types.SimpleNamespace(
                device="cpu", free=lambda slots: freed.extend(slots.tolist())
            ),
            page_size=1,
        )
    )
    first = [31, 32, 33, 34, 35, 36]
    tree.cache_unfinished_req(prefilled(tree, table, 0, first))
    assert table[0, : len(IDS)].tolist() == first
    # The same prompt again: all but its last token are found, that one is prefilled into slot 77.
    again = prefilled(tree, table, 1, [*first[:-1], 77])
    again.cache_protected_len = len(IDS) - 1
    again.prefix_indices = torch.tensor(first[:-1])
    tree.inc_lock_ref(again.last_node)
    assert table[1, len(IDS) - 1] == 77
    tree.cache_unfinished_req(again)
    # The tree's row from now on, and 77 is free for others.
    assert table[1, : len(IDS)].tolist() == first
    assert freed == [77]
