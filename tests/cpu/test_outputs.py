"""A file that cannot be written is told before the work, in one wording; nothing half is left."""

import os

import pytest

from kvlab import cli, outputs
from kvlab.errors import BadInput

# None of these comes as far as to miss its server, its GPU or its trace.
COMMANDS = [
    "bench attention --recorded --out",
    "bench attention --html",
    "bench step --out",
    "bench step --strategies exact --trace",
    "bench serve --model-path nowhere --out",
    "bench serve --url http://127.0.0.1:9 --out",
    "patch verify --url http://127.0.0.1:9 --save",
    "trace report nowhere.json --html",
    "trace diff nowhere.json nowhere.json --html",
]
RIGHT = "give a file in a folder that exists and can be written"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_so_first(command, tmp_path, capsys):
    option = command.split()[-1]
    for path, why in ((tmp_path / "no" / "x", "No such file or directory"), (tmp_path, "it is a folder")):
        with pytest.raises(SystemExit) as done:
            cli.main([*command.split(), str(path)])
        said = capsys.readouterr()
        assert (done.value.code, said.out) == (2, "")
        assert said.err == f"kvlab: {option}: {path} cannot be written: {why}; {RIGHT}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    outputs.check("--out", link)
    outputs.write("--out", link, "new")
    assert (link.is_symlink(), real.read_text()) == (True, "new")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        BadInput, match=rf"^--out: {link} cannot be written: No space left on device; {RIGHT}"
    ):
        outputs.write("--out", link, b"newer")
    with pytest.raises(BadInput, match="No space"), outputs.new_folder("--out", tmp_path / "folder") as made:
        (made / "x").touch()
    assert real.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_what_is_no_file_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        outputs.check("--out", pipe)
        outputs.write("--out", pipe, "é")
        assert os.read(reader, 9).decode() == "é"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_folder_is_new_or_empty(tmp_path):
    for path, why in (
        (tmp_path, "it exists and is not an empty folder"),
        (tmp_path / "file", "it exists and is no folder"),
        (tmp_path / "file" / "below", f"{tmp_path / 'file'} is no folder"),
    ):
        (tmp_path / "file").touch()
        with pytest.raises(BadInput, match=f"--out: {path} cannot be written: {why}; give a new folder"):
            outputs.new_folder("--out", path).__enter__()
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "new" / "one"):
        with outputs.new_folder("--out", path) as made:
            (made / "x").touch()
        assert [p.name for p in path.iterdir()] == ["x"]
    with pytest.raises(ZeroDivisionError), outputs.new_folder("--out", tmp_path / "failed") as made:
        (made / "x").write_text(str(1 / 0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "new"]
