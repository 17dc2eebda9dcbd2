"""The files that pin versions agree; pip resolves the GPU host's; kvlab's wheel changes nothing there."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "environment.yml").is_file(), reason="environment.yml lies in the checkout, not in a wheel"
)
# The CPU test environment and SGLang's pins differ here on purpose, and nowhere else.
BY_DESIGN = {"torch", "triton"}
RESOLVE_SECONDS = 400


def pip_section():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return next(d["pip"] for d in dependencies if isinstance(d, dict))


def pinned(lines):
    """{name: Requirement} of the lines that are requirements; editable and comment lines are not."""
    found = {}
    for line in lines:
        line = line.strip()
        if line and not line.startswith(("#", "-")):
            r = Requirement(line)
            found[canonicalize_name(r.name)] = r
    return found


@pytest.fixture(scope="module")
def constraints():
    return pinned((ROOT / "constraints.txt").read_text().splitlines())


@pytest.fixture(scope="module")
def environment():
    return pinned(line for line in pip_section() if not line.startswith("-e"))


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def version(requirement):
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", requirement
    return specifier.version


def test_constraints_pin_everything_exactly(constraints):
    assert len(constraints) > 100
    for requirement in constraints.values():
        assert version(requirement)


def test_shared_pins_are_equal(constraints, environment):
    shared = {n for n in environment.keys() & constraints.keys() if "==" in str(environment[n].specifier)}
    assert {"jupyterlab", "papermill", "jupytext", "jupyter-book", "transformers"} <= shared - BY_DESIGN
    for name in shared - BY_DESIGN:
        assert version(environment[name]) == version(constraints[name]), name
    for name in BY_DESIGN:
        assert version(environment[name]) != version(constraints[name]), f"{name}: not by design any more"


def test_pyproject_allows_what_both_files_pin(constraints, environment, project):
    wanted = [
        *project["dependencies"],
        *(r for group in project["optional-dependencies"].values() for r in group),
    ]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name == "kvlab":
            continue
        assert name in constraints, f"constraints.txt does not pin {name}"
        for where in (constraints, environment):
            if name in where and "==" in str(where[name].specifier):
                assert requirement.specifier.contains(version(where[name]), prereleases=True), (
                    name,
                    where[name],
                )


@pytest.mark.skipif(
    (sys.platform, sys.version_info[:2]) != ("linux", (3, 11)), reason="constraints.txt is Linux, Python 3.11"
)
def test_what_is_pinned_is_what_something_asks_for(constraints, project):
    """A pin that no requirement leads to is debris of the environment that it was frozen from."""
    todo = [
        *map(Requirement, project["dependencies"]),
        *(Requirement(r) for group in project["optional-dependencies"].values() for r in group),
    ]
    asked = set()
    while todo:
        wanted = todo.pop()
        for extra in ("", *wanted.extras):
            name = canonicalize_name(wanted.name)
            if name == "kvlab" or (name, extra) in asked:
                continue
            asked.add((name, extra))
            requirements = map(Requirement, metadata.distribution(name).requires or ())
            todo += [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]
    names = {name for name, _ in asked}
    assert not constraints.keys() - names
    if "+cpu" in metadata.version("torch") or not find_spec("nvidia.cudnn"):
        # A torch for CUDA brings NVIDIA's libraries, each of its own version.
        assert not names - constraints.keys()


def makes(*args):
    make = ["make", "-C", ROOT, "--no-print-directory", *args]
    return subprocess.run(make, capture_output=True, text=True)


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
def test_make_help_names_every_target():
    done = makes("help", "PORT=8123")
    named = set(re.findall(r"^make (\S+)", done.stdout, re.M))
    assert {"env", "book", "test", "test-sglang", "serve", "lint", "clean"} <= named
    assert "http://127.0.0.1:8123/" in done.stdout
    phony = " ".join(re.findall(r"^\.PHONY:(.*)", (ROOT / "Makefile").read_text(), re.M)).split()
    assert named <= set(phony)


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
def test_a_python_too_old_is_named_and_leaves_nothing(tmp_path):
    old = tmp_path / "python3.9"
    code = "import sys; sys.version_info = (3, 9, 1); sys.version = '3.9.1'; exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    old.chmod(0o755)
    done = makes("env", f"PYTHON={old}", f"VENV={tmp_path / 'made'}")
    assert done.returncode != 0
    assert "kvlab needs Python 3.11 or newer" in done.stderr
    assert "is 3.9.1" in done.stderr
    assert not (tmp_path / "made").exists()


def test_the_base_install_brings_no_torch_and_no_server(project):
    names = {canonicalize_name(Requirement(r).name) for r in project["dependencies"]}
    assert not names & {"torch", "triton", "sglang", "flashinfer-python", "numpy", "plotly", "pandas"}


def test_environment_is_python_3_12_and_installs_kvlab_itself():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert "python=3.12" in dependencies
    assert [line for line in pip_section() if line.startswith("-")] == ["-e .[book]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """kvlab's wheel, built by `pip wheel .`; with the hatchling that is installed, else pip fetches one."""
    out = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *isolation, "-w", out, ROOT]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = out.glob("kvlab-*.whl")
    return made


def test_the_wheel_carries_presets_and_recorded_data(wheel, tmp_path):
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    for inside in ("kvlab/presets/models.toml", "kvlab/presets/gpus.toml", "kvlab/_data/reported/claims.yml"):
        assert inside in names
    assert not [n for n in names if n.startswith(("tests/", "book/", "data/")) or "__pycache__" in n]
    # Unpacked away from the checkout it finds its presets.
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import kvlab, kvlab.models as m; print(kvlab.__file__, m.load('glm-5').latent_dim)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "kvlab/__init__.py"), "576"]


@pytest.fixture(scope="module")
def resolved(wheel, tmp_path_factory):
    """{name: metadata} of what pip takes for Python 3.12 from environment.yml, a wheel in `-e .`'s place."""
    work = tmp_path_factory.mktemp("resolve")
    lines = [re.sub(r"^-e \.(.*)$", rf"{wheel}\1", line) for line in pip_section()]
    (work / "requirements.txt").write_text("\n".join(lines) + "\n")
    unpacked = work / "unpacked"
    unpacked.mkdir()
    # fast-deps reads metadata out of wheels by ranges: whole, this list is gigabytes of CI's disk.
    asked = ["--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", work / "report.json"]
    target = ["--python-version", "3.12", "--only-binary=:all:", "--target", work / "none"]
    command = [sys.executable, "-m", "pip", "install", "-q", *asked, *target, "-r", work / "requirements.txt"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=RESOLVE_SECONDS,
            env={**os.environ, "TMPDIR": str(unpacked)},
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index did not answer within {RESOLVE_SECONDS} s")
    finally:
        shutil.rmtree(unpacked)
    if re.search(r"NewConnectionError|Failed to establish|No route|Temporary failure in name", done.stderr):
        pytest.skip("no package index here")
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (work / "none").exists()
    report = json.loads((work / "report.json").read_text())
    return {canonicalize_name(i["metadata"]["name"]): i["metadata"] for i in report["install"]}


def test_pip_resolves_the_environment(resolved, environment):
    for name, requirement in environment.items():
        assert requirement.specifier.contains(resolved[name]["version"]), name
    assert "kvlab" in resolved


def test_torch_triton_and_flashinfer_are_the_ones_sglang_pins(resolved, environment):
    def pins(package):
        requirements = map(Requirement, resolved[package]["requires_dist"])
        return {canonicalize_name(r.name): r for r in requirements if "extra" not in str(r.marker)}

    of_sglang = pins("sglang")
    for name in ("torch", "flashinfer-python", "flashinfer-cubin", "transformers"):
        assert version(environment[name]) == version(of_sglang[name]) == resolved[name]["version"], name
    assert environment["flashinfer-python"].extras == of_sglang["flashinfer-python"].extras
    assert version(environment["triton"]) == version(pins("torch")["triton"]) == resolved["triton"]["version"]


def test_kvlab_asks_for_nothing_that_moves_a_serving_environment(resolved):
    asked = {
        canonicalize_name(r.name)
        for r in map(Requirement, resolved["kvlab"]["requires_dist"])
        if "extra" not in str(r.marker)
    }
    assert asked == {"typer", "rich", "msgspec"}
    assert asked <= resolved.keys()
