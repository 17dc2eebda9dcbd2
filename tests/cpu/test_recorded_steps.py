"""The table in a recorded README, read and refused."""

import pytest

from kvlab.bench import recorded_steps
from kvlab.data import recorded
from kvlab.errors import BadInput

README = recorded("h200-stock") / "README.md"


def test_every_row_is_read():
    rows = recorded_steps.read(README)
    text = README.read_text("utf-8")
    assert len(rows) == text.count(" ms |")
    for row in rows:
        assert f"{row.step_ms:g} ms" in text
        assert f"| {row.context:,} | {row.pool:,} |" in text
    assert {r.strategy for r in rows} == {"stock", "control_bf16"}
    assert [r.context for r in rows if not r.cuda_graphs] == [100]


def test_one_row_is_found():
    assert recorded_steps.step(README, "stock") == 77.65
    assert recorded_steps.step(README, "stock", cuda_graphs=False) == 137.1
    assert recorded_steps.step(README, "control_bf16", context=8192) == 11.81


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.replace("| run |", "| what |"), "no table with the columns"),
        (lambda t: t.replace("77.65 ms", "77.65 s"), "is no run"),
        (lambda t: t.replace("control, BF16 KV", "other"), "is no run"),
    ],
)
def test_another_table_is_refused(edit, says, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(edit(README.read_text("utf-8")))
    with pytest.raises(BadInput, match=says):
        recorded_steps.read(path)


def test_logged_sizes_are_read():
    assert recorded_steps.logged_gb(README, 495_552) == 20.74
    assert recorded_steps.logged_gb(README, 65_536) == 5.48
    with pytest.raises(BadInput, match="0 log lines for a pool of 7 tokens"):
        recorded_steps.logged_gb(README, 7)


def test_missing_row_and_file_are_named(tmp_path):
    with pytest.raises(BadInput, match="0 rows for stock, context 7"):
        recorded_steps.step(README, "stock", context=7)
    with pytest.raises(BadInput, match=r"absent\.md: No such file"):
        recorded_steps.read(tmp_path / "absent.md")
