"""A compiled kernel is launched again without Triton's binder where its variant is certainly the same."""

from types import SimpleNamespace

import pytest
import torch
from kernel_inputs import bits, random_pool, stock_bits

from kvlab.kernels import direct
from kvlab.kernels.direct import Direct
from kvlab.patch import casts
from kvlab.patch.write import NewRows


class Compiled:
    """What Triton answers a launch with."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self):
        self.launched, self.watched = [], []

    def __getitem__(self, grid):
        return lambda *args, stream: self.watched.append((grid, args, stream))

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        assert (function, packed, metadata, enter, leave) == (11, (4, 1, 0), None, None, None)
        self.launched.append(((x, y, z), args, stream))


class Kernel:
    """A Triton kernel of a few lines: `compiled` has one entry for each launch of Triton's own."""

    arg_names = ("x", "y", "stride", "count", "WIDTH", "KIND")

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.compiled.append((grid, args, constants))
            return self.answer

        return launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(direct, "is_known", lambda: True)
    monkeypatch.setattr(direct, "current_stream", lambda device: 77)
    made = Kernel()
    made.answer = Compiled()
    return made


def launch(run, x, y, *, key=("a",), stride=8, count=5, grid=3):
    run(key, grid, (x, y), (stride, count), lambda: {"KIND": 2, "WIDTH": 16, "num_warps": 4})


def test_the_second_launch_of_a_kind_is_direct_with_the_parameters_in_order(kernel):
    run, x, y = Direct(kernel), torch.zeros(8), torch.zeros(8)
    launch(run, x, y)
    assert kernel.compiled == [((3,), (x, y, 8, 5), {"KIND": 2, "WIDTH": 16, "num_warps": 4})]
    launch(run, y, x, count=7, grid=9)
    assert len(kernel.compiled) == 1
    assert kernel.answer.launched == [((9, 1, 1), (y.data_ptr(), x.data_ptr(), 8, 7, 16, 2), 77)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_who_watches_launches_sees_the_direct_ones(kernel, hook, monkeypatch):
    """A profiler's hooks: a chain of them in newer releases, a function or none in 3.4."""
    run, x, y = Direct(kernel), torch.zeros(8), torch.zeros(8)
    launch(run, x, y)
    for watching in (lambda metadata: None, SimpleNamespace(calls=[print])):
        monkeypatch.setattr(direct.knobs.runtime, hook, watching)
        launch(run, x, y)
    assert (len(kernel.compiled), len(kernel.answer.launched)) == (1, 0)
    assert [w[1] for w in kernel.answer.watched] == [(x.data_ptr(), y.data_ptr(), 8, 5, 16, 2)] * 2
    for nobody in (None, SimpleNamespace(calls=[])):
        monkeypatch.setattr(direct.knobs.runtime, hook, nobody)
        launch(run, x, y)
    assert len(kernel.answer.launched) == 2


def test_what_triton_might_compile_anew_for_is_triton_s(kernel):
    run, x, y = Direct(kernel), torch.zeros(64), torch.zeros(64)
    for _ in range(2):
        launch(run, x, y)
    apart = torch.zeros(65)[1:]
    assert apart.data_ptr() % 16
    for again in (
        lambda: launch(run, apart, y),
        lambda: launch(run, x, apart),
        lambda: launch(run, x, y, count=2**31),
        lambda: launch(run, x, y, key=("b",)),
    ):
        before = len(kernel.compiled), len(kernel.answer.launched)
        again()
        assert (len(kernel.compiled), len(kernel.answer.launched)) == (before[0] + 1, before[1])


def test_an_unaligned_first_launch_is_not_kept(kernel):
    run, x = Direct(kernel), torch.zeros(64)
    launch(run, torch.zeros(65)[1:], x)
    launch(run, x, x)
    assert len(kernel.compiled) == 2


@pytest.mark.parametrize("why", ["release", "interpreter"])
def test_an_unknown_release_and_the_interpreter_stay_with_triton_s_own_launches(kernel, monkeypatch, why):
    if why == "release":
        monkeypatch.setattr(direct, "is_known", lambda: False)
    else:
        kernel.answer = None
    run, x, y = Direct(kernel), torch.zeros(8), torch.zeros(8)
    for _ in range(3):
        launch(run, x, y)
    assert len(kernel.compiled) == 3


def test_the_installed_triton_is_known_and_another_would_not_be(monkeypatch):
    from triton.runtime.jit import JITFunction

    direct.is_known.cache_clear()
    assert direct.is_known()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: None)
    direct.is_known.cache_clear()
    assert not direct.is_known()
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    direct.is_known.cache_clear()
    assert not direct.is_known(), "there a tensor's size decides on the variant too"
    direct.is_known.cache_clear()


def test_the_stream_s_handle_also_where_torch_has_no_short_way_to_it(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5 + device, raising=False)
    assert direct.current_stream(1) == 6
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=9 + device))
    assert direct.current_stream(1) == 10


@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("middle", [False, True], ids=["[tokens, width]", "[tokens, 1, width]"])
def test_a_write_also_clears_slot_0_of_a_wide_layer(device, tokens, middle, monkeypatch):
    monkeypatch.setattr(casts, "INTERPRET", True)
    rows = random_pool(12, 48, torch.float8_e4m3fn, seed=1, device=device)
    new = torch.randn(tokens, 48).bfloat16().to(device)
    nope, rope = new[:, :32], new[:, 32:]
    if middle:
        nope, rope = nope.unsqueeze(1), rope.unsqueeze(1)
    buffer = rows.view(torch.uint8).clone()
    want = buffer.clone()
    loc = torch.arange(2, 2 + tokens, device=device)
    want[loc] = new.to(torch.float8_e4m3fn).view(torch.uint8).unsqueeze(1)
    wide = torch.full((12, 1, 48), float("nan"), dtype=torch.bfloat16, device=device)
    NewRows(buffer, loc, nope, rope, torch.float8_e4m3fn).write(wide)
    assert torch.equal(buffer, want)
    assert not bits(wide)[0].any()
    assert wide[1:].isnan().all()
    assert torch.equal(bits(wide)[:1], stock_bits(torch.zeros_like(rows)[:1], torch.bfloat16))
