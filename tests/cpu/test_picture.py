"""README's picture: drawn from the recordings, committed, and up to date."""

import re
import shutil
from xml.etree import ElementTree

from kvlab import data
from kvlab.bench import recorded_steps
from kvlab.book import picture
from kvlab.book.pages import checkout

SVG = "{http://www.w3.org/2000/svg}"


def bars(text, kind):
    return [r for r in ElementTree.fromstring(text).iter(f"{SVG}rect") if r.get("class") == kind]


def test_the_committed_picture_is_what_the_recordings_give():
    committed = (checkout() / picture.FILE).read_text("utf-8")
    assert committed == picture.draw(), "python -m kvlab book picture draws it again"


def test_bars_are_to_scale():
    readme = data.recorded("h200-stock") / "README.md"
    text = picture.draw()
    cast, rest = bars(text, "cast")[0], bars(text, "rest")
    stock = float(cast.get("width")) + float(rest[0].get("width"))
    control = float(rest[2].get("width"))
    ratio = recorded_steps.step(readme, "stock") / recorded_steps.step(readme, "control_bf16")
    assert abs(stock / control / ratio - 1) < 1e-3
    # One layer: its cast is wider than all else together.
    layer = [r for kind in ("cast", "rest", "attention") for r in bars(text, kind) if r.get("y") == "262"]
    widths = {
        kind: sum(float(r.get("width")) for r in layer if r.get("class") == kind) for kind in ("cast", "rest")
    }
    assert widths["cast"] > widths["rest"] > 0


def test_another_recording_gives_another_picture(tmp_path, monkeypatch):
    shutil.copytree(data.root(), tmp_path / "data")
    readme = tmp_path / "data/recorded/h200-stock/README.md"
    readme.write_text(readme.read_text("utf-8").replace("11.49 ms", "23.45 ms"))
    before = picture.draw()
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    changed = picture.draw()
    assert "23.4 ms" in changed or "23.5 ms" in changed
    assert len(re.findall(r"11\.5 ms", before)) == 2
    assert "11.5 ms" not in changed
