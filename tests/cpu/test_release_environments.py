"""A release's environment links torch and triton from a finished one, where that is as good as installing."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

MAKE_ENV = Path(__file__).parents[1] / "sglang" / "make_env.py"
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


@pytest.fixture(scope="module")
def make_env():
    spec = importlib.util.spec_from_file_location("make_env", MAKE_ENV)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(folder, packages, stamp=".ready"):
    """An environment with one-file packages, `{name: (version, requirement)}`."""
    site = folder / SITE
    for name, (version, requires) in packages.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\n" + f"Requires-Dist: {requires}\n" * bool(requires))
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"by = {folder.name!r}")
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / f"{name}run").write_text("#!")
        files = [f"{name}/__init__.py", f"{name}/__pycache__/__init__.pyc", f"{info.name}/METADATA"]
        rows = [f"../../../bin/{name}run,sha256=,2", *(f"{f},," for f in files), f"{info.name}/RECORD,,"]
        (info / "RECORD").write_text("\n".join(rows))
    if stamp:
        (folder / stamp).touch()
    return folder


WANTED = [("torch", "2.13.0"), ("triton", "3.7.0")]


def shared(folder):
    site = folder / SITE
    return {p.name: (site / p.name / "__init__.py").stat() for p in site.glob("t*") if "-" not in p.name}


def test_files_are_linked_and_scripts_are_not(make_env, tmp_path):
    donor = environment(tmp_path / ".venv", {"torch": ("2.13.0+cpu", ""), "triton": ("3.7.0", "")})
    new = tmp_path / ".venv-new"
    # What Python compiled there since then, which no RECORD lists.
    compiled = Path(importlib.util.cache_from_source(donor / SITE / "torch" / "__init__.py"))
    compiled.parent.mkdir()
    compiled.touch()
    assert make_env.share(new, WANTED, [donor, new])
    assert (new / compiled.relative_to(donor)).stat().st_ino == compiled.stat().st_ino
    assert {n: s.st_ino for n, s in shared(new).items()} == {n: s.st_ino for n, s in shared(donor).items()}
    assert (new / SITE / "torch-2.13.0+cpu.dist-info" / "RECORD").is_file()
    assert not (new / "bin").exists()
    # As pip does it: a file replaced in one is not replaced in the other.
    (tmp_path / "newer").write_text("by = 'pip'")
    os.replace(tmp_path / "newer", new / SITE / "torch" / "__init__.py")
    assert (donor / SITE / "torch" / "__init__.py").read_text() == "by = '.venv'"


def test_another_version_a_cuda_build_and_an_unfinished_environment_are_left_to_pip(make_env, tmp_path):
    donors = [
        environment(
            tmp_path / ".venv", {"torch": ("2.13.0", "nvidia-cublas==13.1; platform_system == 'Linux'")}
        ),
        environment(tmp_path / ".venv-a", {"torch": ("2.12.0", ""), "triton": ("3.7.0.post1", "")}),
        environment(tmp_path / ".venv-b", {"torch": ("2.13.0", ""), "triton": ("3.7.0", "")}, stamp=""),
    ]
    new = tmp_path / ".venv-new"
    assert make_env.share(new, WANTED, donors)
    assert shared(new) == {}
    (donors[-1] / ".third-party").touch()
    assert make_env.share(new, WANTED, donors)
    assert set(shared(new)) == {"torch", "triton"}


def test_a_file_system_without_links_is_left_to_pip(make_env, tmp_path, monkeypatch):
    donor = environment(tmp_path / ".venv", {"torch": ("2.13.0", ""), "triton": ("3.7.0", "")})

    def refuse(*names):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert not make_env.share(tmp_path / ".venv-new", WANTED, [donor])
    # So is a donor that has lost a file.
    monkeypatch.undo()
    (donor / SITE / "triton" / "__init__.py").unlink()
    assert not make_env.share(tmp_path / ".venv-new", WANTED, [donor])
