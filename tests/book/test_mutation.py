"""Scale what the runs recorded: every number that rests on it changes on the page. A typed copy would not."""

import gzip
import json
import re
import shutil
import zlib

import pytest

from .conftest import ROOT, kvlab

PLOTTED = re.compile(r"<script.*?</script>|<details class=\"kv-data\">.*?</details>", re.S)
CELL_NUMBER = re.compile(r'<span class="kv-n"[^>]*>[^<]*</span>')
MEASURED = re.compile(
    r"allocated$|reserved$|device_used$|bytes_avoided$|bytes released$"
    r"|(?:peak|captured|scratch|read|written)_bytes$"
)
NUMBER = re.compile(
    r'<a class="kv-n reference internal" href="[^"]*#(?P<id>n-[^"]+)" title="(?P<title>[^"]*)">'
    r"(?P<shown>[^<]*)</a>"
)


def scaled(x, at=(0,)):
    """Every recorded float by a factor of its own, so that ratios move too; integers are shapes and keys.

    Whole nanoseconds and allocators' bytes are measured all the same: they are scaled by the names of their
    keys. So are the decimals of log lines.
    """
    if isinstance(x, dict):
        return {k: scaled(v, (*at, k)) for k, v in x.items()}
    if isinstance(x, list):
        return [scaled(v, (*at, i)) for i, v in enumerate(x)]
    # Two places of equal letters, as [12] and [21], need different factors too.
    factor = 1.25 + zlib.crc32("/".join(map(str, at)).encode()) % 9973 / 30000
    if type(x) is int and (any(str(key).endswith("_ns") for key in at) or MEASURED.search(str(at[-1]))):
        return round(x * factor)
    if isinstance(x, str) and "lines" in at:
        return re.sub(r"\d+\.\d+", lambda m: f"{float(m[0]) * factor:.2f}", x)
    return x * factor if isinstance(x, float) else x


def scaled_trace(trace):
    """Half as long again, every kernel by a factor of its name and place: nothing overlaps that did not."""
    for i, event in enumerate(trace["traceEvents"]):
        factor = 1.5
        if event.get("cat") == "kernel":
            factor = 1.05 + sum(map(ord, event["name"])) % 83 / 300 + i % 11 / 200
        for field, by in (("ts", 1.5), ("dur", factor)):
            if field in event:
                event[field] = event[field] * by
    return trace


def scaled_readme(text):
    """Times, sizes and the control's pool; the stock pool is the source text's and a key, as contexts are."""

    def one(m):
        return f"{float(m[1]) * (1.2 + sum(map(ord, m[1])) % 97 / 300):.2f}"

    text = re.sub(r"(\d+\.?\d*)(?= (?:ms|GB))", one, text)
    return text.replace("65,536", "131,072").replace("65536", "131072")


def mutate(data):
    for path in sorted((data / "recorded").rglob("*")):
        if path.name == "provenance.json":
            continue
        if path.name == "README.md":
            path.write_text(scaled_readme(path.read_text("utf-8")))
        elif path.suffix == ".json":
            path.write_text(json.dumps(scaled(json.loads(path.read_text("utf-8")))))
        elif path.name.endswith(".trace.json.gz"):
            with gzip.open(path, "rt") as f:
                trace = scaled_trace(json.load(f))
            with gzip.open(path, "wt") as f:
                json.dump(trace, f)


@pytest.fixture(scope="module")
def before(html):
    return html / "book"


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """The same book over mutated recordings, its README brought up to date."""
    root = tmp_path_factory.mktemp("mutated")
    for name in ("_config.yml", "README.md"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("executed"))
    shutil.copytree(ROOT / "data", root / "data")
    mutate(root / "data")
    for args in (("run",), ("readme",), ("build",)):
        done = kvlab("book", *args, cwd=root, KVLAB_DATA=str(root / "data"))
        assert done.returncode == 0, done.stderr
    return root / "_build" / "html" / "book"


def numbers_of(html):
    """Every number of a page in order: anchor of its origin, origin, text."""
    return [(m["id"], m["title"], m["shown"]) for m in NUMBER.finditer(html)]


def rests_on_a_recording(title):
    return "data/recorded/" in title and "claims.yml" not in title


def digits(shown):
    """The first number of a text, if its decimals make it unlikely to stand there twice by chance."""
    m = re.search(r"\d[\d,]*\.\d+", shown)
    return m[0] if m else None


def problems(old, new):
    """What a mutated page gives away: numbers that did not move, and copies of those that did."""
    found = []
    numbers, again = numbers_of(old), numbers_of(new)
    if [n[0] for n in numbers] != [n[0] for n in again]:
        return ["other numbers in another order"]
    moved = set()
    for (anchor, title, shown), (_, _, now) in zip(numbers, again, strict=True):
        if rests_on_a_recording(title) and digits(shown):
            # Two digits meet by chance, as a mean over many shapes does.
            if len(re.sub(r"^[0.,]+|[.,]", "", digits(shown))) < 3:
                continue
            if shown == now:
                found.append(f"{anchor} still reads {shown}")
            else:
                moved.add(digits(shown))
    for anchor, title, shown in again:
        # The source text, or arithmetic on it, may give the same figure (SGLang's log does); not a parameter.
        if digits(shown) in moved and "claims.yml" not in title and not rests_on_a_recording(title):
            found.append(f"{anchor} is a copy: {shown}")
    plain = [
        re.sub(r"<[^>]+>", " ", PLOTTED.sub(" ", CELL_NUMBER.sub(" ", NUMBER.sub(" ", page))))
        for page in (old, new)
    ]
    stayed = set(re.findall(r"\d[\d,]*\.\d+", plain[1])) & set(re.findall(r"\d[\d,]*\.\d+", plain[0]))
    found += [f"{d} is typed" for d in sorted(moved & stayed)]
    return found


def article(path):
    return path.read_text("utf-8").partition("<article")[2].partition("</article>")[0]


def test_every_number_that_rests_on_a_recording_changes(before, after):
    moved = 0
    for path in sorted(before.glob("*.html")):
        if path.stem in ("where-numbers-come-from", "status"):
            continue
        old, new = article(path), article(after / path.name)
        assert problems(old, new) == [], (path.name, problems(old, new))
        moved += sum(a != b for a, b in zip(numbers_of(old), numbers_of(new), strict=True))
    assert moved > 0


def link(name, title, shown):
    return f'<a class="kv-n reference internal" href="x.html#n-{name}" title="{title}">{shown}</a>'


RECORDED = "recorded: data/recorded/one/times.json: cast_us"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (link("a", RECORDED, "827.8 us"), link("a", RECORDED, "827.8 us"), "n-a still reads"),
        (
            link("a", RECORDED, "827.8 us") + link("b", "parameter: b", "827.8 us"),
            link("a", RECORDED, "911.2 us") + link("b", "parameter: b", "827.8 us"),
            "n-b is a copy",
        ),
        (
            link("a", RECORDED, "827.8 us") + "<p>It takes 827.8 us.</p>",
            link("a", RECORDED, "911.2 us") + "<p>It takes 827.8 us.</p>",
            "827.8 is typed",
        ),
    ],
)
def test_a_copy_would_be_seen(old, new, says):
    assert says in problems(old, new)[0]
    assert problems(link("a", RECORDED, "827.8 us"), link("a", RECORDED, "911.2 us")) == []
