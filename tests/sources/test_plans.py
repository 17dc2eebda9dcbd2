"""Plan and run of the real releases, run again on a CPU: what the book shows is what comes out."""

import pytest

from kvlab import plans
from kvlab.backends import rules

pytestmark = pytest.mark.sglang


def test_the_released_code_does_what_is_recorded(release):
    for name in rules.releases("flashinfer-python"):
        release("flashinfer-python", name)
    assert plans.observe() == plans.recorded()
