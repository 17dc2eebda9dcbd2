"""Where does a kernel's scratch lie?"""

import torch

_PAGE = 2 << 20
_BEHIND = 1 << 20


def scratch(need: int, device: torch.device | str) -> torch.Tensor:
    """`need` zero bytes, uint8 [need].

    On a GPU they begin a MiB behind a multiple of 2 MiB and hold 2 MiB more.

    On an H200 results that several blocks add up through memory come up to a fifth later where the tickets,
    with which a decode's scratch begins, are the first bytes of 2 MiB (data/recorded/h200-decode-notes-9).
    Measured at a dozen places; why is not known.
    """
    if torch.device(device).type != "cuda":
        return torch.zeros(need, dtype=torch.uint8, device=device)
    whole = torch.zeros(need + _PAGE, dtype=torch.uint8, device=device)
    at = (_BEHIND - whole.data_ptr()) % _PAGE
    return whole[at : at + need]
