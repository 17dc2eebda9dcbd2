"""The cast kernels compiled ahead of time for chips that are not here, and held to each chip's limits."""

import itertools

import pytest

from kvlab.kernels.aot import CAPABILITIES, Resources, Spec, report

LAYER = {
    "table": "*i32",
    "bounds": "*i32",
    "filled": "*i32",
    "tickets": "*i32",
    "row_stride": "i32",
    "out_stride": "i32",
    "table_stride": "i32",
    "num_slots": "i32",
    "batch": "i32",
    "limit": "i32",
}
ALIGNED = ["rows", "out", "table", "tickets", "row_stride", "out_stride"]


def cast_spec(
    name: str, *, fmt: str = "e4m3", wide: str = "bf16", native: bool, unit: int = 8, **changed
) -> Spec:
    fp8 = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}[fmt]
    constexprs = {
        "WIDTH": 576,
        "UNIT": unit,
        "FEW_UNIT": 8,
        "LEAST_UNIT": 4,
        "LANES": 1024 if native else 512,
        "FEW_LANES": 256,
        "PAGE_SIZE": 1,
        "BATCH": 0,
        "FILLED": False,
        "COMPACT": False,
        "E5M2": fmt == "e5m2",
        "BF16": wide == "bf16",
        "NATIVE": native,
        "WORDS": native,
    }
    return Spec(
        name=f"{name} {fmt} {wide} {'native' if native else 'bytes'}",
        kernel="kvlab.kernels.cast_kernel:kvlab_cast",
        signature={"rows": fp8 if native else "*u8", "out": f"*{wide}"} | LAYER,
        constexprs=constexprs | changed,
        divisible=ALIGNED,
        num_warps=8,
        maxnreg=64 if (constexprs | changed)["WORDS"] else None,
    )


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


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], Resources]:
    every = [
        cast_spec("shadow", fmt=f, wide=w, native=n)
        for (f, w), n in itertools.product((("e4m3", "bf16"), ("e5m2", "fp16")), (True, False))
    ]
    every += [cast_spec("paged", native=n, BATCH=128, PAGE_SIZE=64) for n in (True, False)]
    every += [cast_spec("odd rows", native=True, WORDS=False)]
    every += [cast_spec("gather", native=n, COMPACT=True, FILLED=True, PAGE_SIZE=64) for n in (True, False)]
    every += map_specs(0) + map_specs(128) + list_specs(0, False) + list_specs(128, False)
    launched_early = report(list_specs(0, True) + list_specs(128, True), [90, 100, 120])
    return {(r.name, r.capability): r for r in [*report(every), *launched_early]}


def test_every_kernel_fits_every_chip(compiled):
    assert len({c for _, c in compiled}) == len(CAPABILITIES) == 5
    for (name, capability), found in compiled.items():
        if capability == 80 and name.endswith("native"):
            continue
        assert found.exceeds() == [], f"{name} on sm_{capability}"
        assert found.registers > 0
        assert found.stack == 0


def test_sm80_has_no_e4m3_and_is_served_by_bytes(compiled):
    """Why there are two ways: what tuning() chooses for SM80 is the one that compiles there."""
    assert "fp8e4nv not supported" in compiled["shadow e4m3 bf16 native", 80].error
    assert compiled["shadow e4m3 bf16 bytes", 80].exceeds() == []


def test_a_limit_that_is_broken_is_named():
    fits = Resources(name="k", capability=120, threads=256, registers=64, shared=90 << 10)
    assert fits.exceeds() == []
    big = Resources(name="k", capability=120, threads=512, registers=168, shared=120 << 10, spill_stores=8)
    words = "; ".join(big.exceeds())
    assert "shared memory 122880 B of 101376 B" in words
    assert "168 registers x 512 threads" in words
    assert "spills 8 B out and 0 B in" in words
