"""The cast kernels compiled ahead of time for chips that are not here, and held to each chip's limits."""

import importlib

import msgspec
import pytest
import torch
from kernel_inputs import FORMATS, paged_case, ragged_case

from kvlab.kernels import cast, clear, write_cast
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.aot import CAPABILITIES, REGISTERS_PER_SM, Resources, Spec, report_each
from kvlab.kernels.cast import list_for, map_workspace
from kvlab.kernels.cast_cut import tuning_for
from kvlab.kernels.slot_map import SlotMap

ROW = 576
TYPES = {
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# What the kernels leave unspecialised on purpose, so that a batch makes no new one.
RUNTIME = ("table_stride", "num_slots", "batch", "limit", "pages", "writes")


class Noted:
    """Stands where a kernel is launched, and notes as specs what the launches would compile."""

    def __init__(self, kernel: str) -> None:
        self.kernel, self.specs = kernel, []
        module, _, function = kernel.partition(":")
        self.arg_names = getattr(importlib.import_module(module), function).arg_names

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, num_warps, maxnreg=None, **constants) -> None:
        given = dict(zip(self.arg_names, arguments, strict=False))
        tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
        sizes = [n for n, v in given.items() if n not in tensors and n not in RUNTIME and v % 16 == 0]
        self.specs.append(
            Spec(
                name="",
                kernel=self.kernel,
                signature={n: TYPES[v.dtype] if n in tensors else "i32" for n, v in given.items()},
                constexprs=constants,
                divisible=[n for n, t in tensors.items() if t.data_ptr() % 16 == 0] + sizes,
                num_warps=num_warps,
                maxnreg=maxnreg,
            )
        )


def aligned(*shape: int, dtype: torch.dtype, stride: int = 0) -> torch.Tensor:
    return torch.zeros(
        *shape[:-1], stride or shape[-1], dtype=torch.uint8 if dtype in FORMATS else dtype
    ).view(dtype)[..., : shape[-1]]


def a_map(active: ActiveSlots, slots: int) -> SlotMap:
    """What `slot_map` would return, without its launches."""
    its = map_workspace(active, slots)
    found = its.slots, its.slots_filled, its.count, its.new_indices, its.overflow
    return SlotMap(*found, slots, active.page_size, active.is_paged, its.rows)


def cast_specs(capability: int) -> list[Spec]:
    """What `shadow_cast` and `gather_cast` launch on a chip, as they launch it, rows of every kind."""
    noted, cut = Noted("kvlab.kernels.cast_kernel:kvlab_cast"), tuning_for(capability)
    ragged = ragged_case([5], num_slots=64, seed=0).active
    pages = paged_case([5] * 65, 64, num_slots=192, seed=0).active
    found = list_for(64, "cpu")
    e4m3, e5m2 = FORMATS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cast._cast, "kernel", noted)
        for name, fmt, wide, source, slots, stride in (
            ("ragged", e4m3, torch.bfloat16, ragged, 64, 0),
            ("ragged e5m2", e5m2, torch.float16, ragged, 64, 0),
            ("list", e4m3, torch.bfloat16, found, 64, 0),
            ("paged", e4m3, torch.bfloat16, pages, 192, 0),
            ("odd rows", e4m3, torch.bfloat16, ragged, 64, ROW + 5),
        ):
            rows = aligned(slots, 1, ROW, dtype=fmt, stride=stride)
            cast.shadow_cast(rows, aligned(slots, 1, ROW, dtype=wide), source, cut=cut)
            noted.specs[-1] = msgspec.structs.replace(noted.specs[-1], name=name)
        for name, active in (("gather", ragged), ("gather pages", pages)):
            rows, compact = aligned(192, 1, ROW, dtype=e4m3), aligned(192, 1, ROW, dtype=torch.bfloat16)
            cast.gather_cast(rows, compact, a_map(active, 192), cut=cut)
            noted.specs[-1] = msgspec.structs.replace(noted.specs[-1], name=name)
    return noted.specs


def small_specs() -> list[Spec]:
    """The patch's two small kernels: tails of last pages, and a list without the slots that are written."""
    tails = Noted("kvlab.kernels.clear:kvlab_clear_tails")
    without = Noted("kvlab.kernels.write_cast:kvlab_slot_list_without")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clear._launch, "kernel", tails)
        patch.setattr(write_cast._without, "kernel", without)
        pages = paged_case([5] * 3, 64, num_slots=192, seed=0).active
        clear.clear_tails(aligned(192, 1, ROW, dtype=torch.bfloat16), pages)
        count = torch.zeros(1, dtype=torch.int32)
        write_cast.without(torch.zeros(64, dtype=torch.int32), count, torch.zeros(3, dtype=torch.int64))
    named = zip(("tails", "without"), [*tails.specs, *without.specs], strict=True)
    return [msgspec.structs.replace(spec, name=name) for name, spec in named]


def map_specs(batch: int) -> list[Spec]:
    ints = ["table_stride", "new_stride", "batch", "limit", "page_size", "units", "room"]
    pointers = ["table", "bounds", "first", "filled", "partial", "rank", "slots", "slots_filled", "count"]
    pointers += ["overflow", "new_indices"]
    kinds = dict.fromkeys(ints, "i32") | dict.fromkeys(pointers, "*i32")
    arguments = {
        "kvlab_slot_map_mark": "table bounds first filled table_stride batch limit page_size units",
        "kvlab_slot_map_count": "table bounds first partial table_stride batch limit page_size units",
        "kvlab_slot_map_rank": "table bounds first partial rank filled slots slots_filled count overflow "
        "table_stride batch limit page_size units room",
        "kvlab_slot_map_renumber": "table bounds first rank filled new_indices table_stride "
        "new_stride batch limit page_size units",
    }
    extra = {"kvlab_slot_map_rank": {"PROGRAMS": 128}, "kvlab_slot_map_renumber": {"NEVER": 2**31 - 1}}
    return [
        Spec(
            name=f"{kernel} {'paged' if batch else 'ragged'}",
            kernel=f"kvlab.kernels.slot_map:{kernel}",
            signature={a: kinds[a] for a in names.split()},
            constexprs={"BATCH": batch, "LANES": 256} | extra.get(kernel, {}),
            divisible=[a for a in names.split() if a in pointers],
            num_warps=8,
        )
        for kernel, names in arguments.items()
    ]


def list_specs(batch: int, pdl: bool) -> list[Spec]:
    kinds = {"table": "*i32", "bounds": "*i32", "seen": "*u8", "partial": "*i32", "slots": "*i32"}
    kinds |= {"count": "*i32"}
    arguments = {
        "mark": ("table bounds seen table_stride batch limit page_size num_slots", {"BATCH": batch}, 256),
        "count": ("seen partial stretch", {}, 2048),
        "write": ("seen partial slots count stretch", {"PROGRAMS": 128}, 2048),
    }
    return [
        Spec(
            name=f"list {name} {batch}{' pdl' if pdl else ''}",
            kernel=f"kvlab.kernels.slot_list:kvlab_slot_list_{name}",
            signature={a: kinds.get(a, "i32") for a in names.split()},
            constexprs={"LANES": lanes, "PDL": pdl} | extra,
            divisible=[a for a in names.split() if a in kinds],
            num_warps=8,
        )
        for name, (names, extra, lanes) in arguments.items()
    ]


def native() -> Spec:
    """The cast of E4M3 rows as FP8, not as bytes."""
    return next(s for s in cast_specs(90) if s.name == "ragged")


@pytest.fixture(scope="module")
def reported() -> list[Resources]:
    """What each chip is given, and last of all what SM80 is not: the native cast."""
    of_all = map_specs(0) + map_specs(128) + list_specs(0, False) + list_specs(128, False) + small_specs()
    with_pdl = list_specs(0, True) + list_specs(128, True)
    assert cast_specs(89) == cast_specs(90) == cast_specs(100) == cast_specs(120)
    work = [(spec, c) for c in CAPABILITIES for spec in of_all + cast_specs(c)]
    work += [(spec, c) for c in (90, 100, 120) for spec in with_pdl]
    return report_each([*work, (native(), 80)])


@pytest.fixture(scope="module")
def compiled(reported) -> dict[tuple[str, int], Resources]:
    return {(r.name, r.capability): r for r in reported[:-1]}


def test_every_kernel_fits_every_chip(compiled):
    every = {c for _, c in compiled}
    assert every == set(CAPABILITIES)
    assert len(every) == 5
    for name in ("ragged", "ragged e5m2", "list", "paged", "odd rows", "gather", "gather pages"):
        assert {c for n, c in compiled if n == name} == every
    for (name, capability), found in compiled.items():
        assert found.exceeds() == [], f"{name} on sm_{capability}"
        assert found.registers > 0
        assert found.stack == 0


def test_as_many_programs_fit_an_sm_as_are_launched_on_it(compiled):
    """The grid is fixed at what an SM holds at once: one that waited for another would end last.

    But for rows at odd bytes, which no pool of a release has.
    """
    for (name, capability), found in compiled.items():
        if name in ("ragged", "list", "paged", "gather"):
            held = REGISTERS_PER_SM // (found.registers * found.threads)
            assert held >= tuning_for(capability).grid, f"{name} on sm_{capability}: {found.registers}"


def test_sm80_has_no_e4m3_and_is_served_by_bytes(reported):
    """Why there are two ways: what tuning_for() chooses for SM80 is the one that compiles there."""
    assert native().signature["rows"] == "*fp8e4nv"
    assert (reported[-1].name, reported[-1].capability) == ("ragged", 80)
    assert "fp8e4nv not supported" in reported[-1].error
    assert next(s for s in cast_specs(80) if s.name == "ragged").signature["rows"] == "*u8"


def test_a_limit_that_is_broken_is_named():
    fits = Resources(name="k", capability=120, threads=256, registers=64, shared=90 << 10)
    assert fits.exceeds() == []
    big = Resources(name="k", capability=120, threads=512, registers=168, shared=120 << 10, spill_stores=8)
    words = "; ".join(big.exceeds())
    assert "shared memory 122880 B of 101376 B" in words
    assert "168 registers x 512 threads" in words
    assert "spills 8 B out and 0 B in" in words
