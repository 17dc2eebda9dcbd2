"""Provenance says how a number was made, and nothing of where a host keeps its files."""

import os
import subprocess
import sys
from pathlib import Path

from kvlab import provenance


def test_python_m_is_named_by_its_package(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/kvlab/__main__.py", "bench", "cast", "--out=/a/b/run"])
    assert provenance.collect().command == "python -m kvlab bench cast --out=run"


def test_a_module_is_named_as_it_was_started(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "job.py").write_text(
        "from kvlab import provenance; print(provenance.collect().command)"
    )
    root = str(Path(provenance.__file__).resolve().parents[1])
    command = [sys.executable, "-m", "pkg.job", "--out", "x"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "python -m pkg.job --out x\n"


def test_baseline_says_what_the_patch_was(monkeypatch):
    monkeypatch.setenv("KVLAB_PATCH", "off")
    assert provenance.collect().kvlab_patch == "off"
    monkeypatch.delenv("KVLAB_PATCH")
    assert provenance.collect().kvlab_patch == "unset"


def test_no_path_of_the_host_is_kept():
    command = [
        "python -m kvlab",
        "--out",
        "/home/me/run",
        "--one-batch",
        "--model-path /home/me/rank --log=/x/y 3",
    ]
    kept = provenance.collect(command).command
    assert kept == "python -m kvlab --out run --one-batch --model-path rank --log=y 3"
