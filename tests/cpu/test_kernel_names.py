"""A profiler shows kernels by name: ours all say whose they are, and the trace rules know every one."""

import re
from pathlib import Path

import pytest

import kvlab
from kvlab.trace.classes import classify

SOURCES = Path(kvlab.__file__).parent
LAUNCHED = re.compile(r"^ *(\w+)\[(?:grid|\()|Direct\((\w+)\)", re.MULTILINE)
CLASSES = {
    "kvlab_cast": "dtype cast",
    "kvlab_clear_tails": "attention",
    "kvlab_kv_write": "KV write",
    "kvlab_mla_decode": "attention",
    "kvlab_mla_merge": "attention",
    "kvlab_slot_list_count": "attention",
    "kvlab_slot_list_mark": "attention",
    "kvlab_slot_list_without": "attention",
    "kvlab_slot_list_write": "attention",
    "kvlab_slot_map_count": "attention",
    "kvlab_slot_map_mark": "attention",
    "kvlab_slot_map_rank": "attention",
    "kvlab_slot_map_renumber": "attention",
    "kvlab_write_cast": "dtype cast",
}


def launched(folder: str) -> set[str]:
    found = set()
    for path in (SOURCES / folder).glob("*.py"):
        text = path.read_text()
        if "import triton" in text or "import Direct" in text:
            found |= {a or b for a, b in LAUNCHED.findall(text)}
    return found


def test_every_triton_kernel_that_is_launched_says_that_it_is_ours():
    names = launched("kernels") | launched("bench")
    assert len(names) > 8
    assert {n for n in names if not n.startswith("kvlab_")} == set()
    assert launched("kernels") == set(CLASSES)


@pytest.mark.parametrize(("name", "cls"), CLASSES.items())
def test_a_trace_puts_it_where_it_belongs(name, cls):
    kind = classify(name)
    assert kind.cls == cls
    assert kind.label.startswith("kvlab: ")
    assert (kind.role == "attention") == (name == "kvlab_mla_decode")
