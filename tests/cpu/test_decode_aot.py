"""The decode kernels compile for chips that are not here, within each one's registers and shared memory."""

import pytest

from kvlab.kernels.aot import CAPABILITIES, report_each
from kvlab.kernels.mla_specs import specs

# Bytes a thread may spill: Triton 3.7 spills a few of the batched cut's on SM90 and SM100, 3.6 none. More of
# them from page tables, which on SM90 the CUDA kernels read.
SPILL, SPILL_PAGED = 32, 256


def wanted(capability):
    few = specs(capability, 8)
    one = specs(capability, 16, batch=1, e5m2=True)[:1]
    many = specs(capability, 64, page_size=64, ragged_q=True)[:1]
    paged = specs(capability, 8, page_size=64)[:1]
    return [*few, *one, *many, *paged]


@pytest.fixture(scope="module")
def compiled():
    return report_each([(spec, c) for c in CAPABILITIES for spec in wanted(c)])


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_fits_the_chip(capability, compiled):
    found = [r for r in compiled if r.capability == capability]
    assert len(found) == len(wanted(capability))
    for r, most in zip(found, [SPILL] * (len(found) - 1) + [SPILL_PAGED], strict=True):
        assert max(r.spill_stores, r.spill_loads) <= most, r
        assert [e for e in r.exceeds() if not e.startswith("spills")] == [], r
        assert r.registers > 16, "a kernel that computes nothing"
