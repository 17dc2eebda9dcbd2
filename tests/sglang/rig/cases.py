"""What several suites ask of: both families, three short requests, and whether outputs are the same."""

import torch

from rig.world import World

FAMILIES = ("flashinfer_mla", "fa3")
LENGTHS = [5, 17, 9]


def ready(family, lengths=LENGTHS, **kwargs):
    its = World(family, max_bs=8, **kwargs).fill()
    for request, n in enumerate(lengths):
        its.allot(request, n + 4)
    return its


def same(want, got):
    """To the bit, of sequences of BF16 or FP16 tensors."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(want, got, strict=True))
