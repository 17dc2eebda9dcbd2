"""A stream's own workspace outlives the calls that outgrow it: captured graphs hold its address."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from kvlab.kernels import hopper


def test_an_outgrown_workspace_stays_where_a_graph_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = False
    monkeypatch.setattr(hopper, "_workspaces", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    device = torch.device("cpu", 0)
    first = weakref.ref(hopper._own_workspace(device, 64))
    captures = True
    used_by_graph = hopper._own_workspace(device, 64).data_ptr()
    captures = False
    hopper._own_workspace(device, 128)
    assert first() is not None
    assert first().data_ptr() == used_by_graph
