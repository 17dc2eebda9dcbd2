"""The command line refuses bad usage with one line and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


BASE_ONLY = """
import sys
for name in ("torch", "triton", "numpy", "plotly", "jupyter_book", "papermill", "jupytext", "ipykernel",
             "transformers", "sglang", "flashinfer", "yaml"):
    sys.modules[name] = None
from kvlab import cli
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["memory", "--model", "glm-5", "--slots", "9", "--json"], 0),
        (["model", "show", "glm-5", "--json"], 0),
        (["gpus", "--json"], 0),
        (["backends", "--model", "glm-5", "--gpu", "rtx-pro-6000", "--sglang", "0.5.9", "--json"], 0),
        (["bench", "cast", "--recorded", "--json"], 0),
        (["bench", "cast", "--json"], 2),
        (["bench", "attention", "--json"], 2),
        (["book", "build"], 2),
        (["book", "run"], 2),
        (["patch", "diff"], 2),
        (["serve"], 2),
    ],
)
def test_without_the_extras_each_command_answers_or_says_what_to_install(args, code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BASE_ONLY, *args], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "install" in done.stderr or "SGLang's environment" in done.stderr
    else:
        assert done.stderr == ""
        json.loads(done.stdout)
    assert not list(tmp_path.iterdir())


def test_a_missing_module_of_kvlab_itself_is_no_bad_input():
    code = "import sys; sys.modules['kvlab.gpus'] = None; from kvlab import cli; cli.main(['gpus'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("args", [["gpus"], ["model", "show", "glm-5"], ["bench", "cast", "--recorded"]])
def test_a_terminal_without_unicode_gets_escapes_not_a_traceback(args):
    env = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "20", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-m", "kvlab", *args], capture_output=True, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_json_stays_json_where_the_encoding_lacks_a_character(tmp_path):
    folder = tmp_path / "\u6a21\U0001f600"
    folder.mkdir()
    (folder / "config.json").write_text(
        kvlab("model", "show", "glm-5", "--json").stdout.replace('"attention_layers"', '"num_hidden_layers"')
    )
    env = os.environ | {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "kvlab", "model", "show", str(folder)]
    for options in ([], ["--json"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\\u6a21\\ud83d\\ude00" in done.stdout
    assert json.loads(done.stdout)["name"] == folder.name


@pytest.mark.parametrize("args", [["gpus"], ["gpus", "--json"], ["bench", "cast", "--recorded", "--json"]])
def test_a_reader_that_goes_away_is_no_error(args):
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "kvlab", *args], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("args", [["gpus"], ["gpus", "--json"], ["--version"]])
def test_a_full_disk_is_one_line(args):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvlab", *args], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "kvlab: the output cannot be written: No space left on device\n"
