"""The command line refuses bad usage with one line and exit code 2."""

import subprocess
import sys

import pytest


def kvlab(*args):
    return subprocess.run([sys.executable, "-m", "kvlab", *args], capture_output=True, text=True)


@pytest.mark.parametrize("args", [("nonsense",), ("--nonsense",), ()])
def test_bad_usage_is_one_line_and_exit_2(args):
    done = kvlab(*args)
    if not args:
        assert "Usage" in done.stdout + done.stderr
        return
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "nonsense" in done.stderr


def test_version():
    done = kvlab("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvlab ")


def test_import_costs_nothing():
    code = "import sys; before = set(sys.modules); import kvlab; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kvlab']"
