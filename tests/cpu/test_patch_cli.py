"""The patch from outside: a made-up SGLang on sys.path, a made-up server on the loopback interface."""

import ast
import contextlib
import gc
import http.server
import itertools
import json
import os
import re
import socketserver
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest

import kvlab
from kvlab import cli, variables
from kvlab.errors import BadInput
from kvlab.patch import runfiles, verify

BACKEND = """
from __future__ import annotations
import torch
from sglang.srt.pools import anything


class FlashInferMLAAttnBackend:
    def __init__(self, model_runner, skip_prefill=False):
        pass

    def init_forward_metadata(self, forward_batch):
        pass

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        pass

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        prefill_wrapper_paged = self.forward_metadata.prefill_wrapper
        k_buf = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
        return prefill_wrapper_paged.run(q, k_buf[:, :, : layer.v_head_dim])

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        decode_wrapper = self.forward_metadata.decode_wrapper
        k_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(
            q.dtype
        )
        return decode_wrapper.run(q, k_buffer[:, :, : layer.v_head_dim])
"""
LAUNCHER = """
import json, os, sys

if __name__ == "__main__":
    from sglang.srt.layers.attention import flashinfer_mla_backend as backend
    import kvlab.patch
    print(json.dumps({
        "argv": sys.argv,
        "patched": hasattr(backend.FlashInferMLAAttnBackend.forward_decode, "__wrapped__"),
        "strategy": kvlab.patch.status()["strategy"],
        "main": __spec__.name,
    }))
"""


@pytest.fixture
def sglang(tmp_path):
    """A folder with an `sglang` package that has flashinfer's backend, no fa3, and a launcher."""
    files = {
        "sglang/__init__.py": "",
        "sglang/launch_server.py": LAUNCHER,
        "sglang/srt/__init__.py": "",
        "sglang/srt/pools.py": "anything = 1\n",
        "sglang/srt/layers/__init__.py": "",
        "sglang/srt/layers/attention/__init__.py": "",
        "sglang/srt/layers/attention/flashinfer_mla_backend.py": BACKEND,
    }
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "site"


def spawn(site, *args, **env):
    """The command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(site), "KVLAB_RUN_DIR": str(site / "run"), **env}
    for name in ("KVLAB_PATCH", "KVLAB_PATCH_STRICT"):
        if name not in env:
            environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "kvlab", *args], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.fixture
def run(capsys, monkeypatch):
    """The command line in this process: what it printed and its exit code."""

    def run(site, *args):
        monkeypatch.setenv("KVLAB_RUN_DIR", str(site / "run"))
        monkeypatch.syspath_prepend(str(site))
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main(args)
        out, err = capsys.readouterr()
        return types.SimpleNamespace(returncode=left.value.code or 0, stdout=out, stderr=err)

    return run


def test_status_of_an_sglang_that_is_installed_but_not_running(sglang, run):
    done = run(sglang, "patch", "status", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    states = {s["site"]: (s["state"], s["reason"]) for s in found["sites"]}
    assert states["flashinfer_mla.decode"] == ("recognised", "not applied")
    assert states["fa3.decode"] == (
        "left alone",
        "this release has no srt/layers/attention/flashattention_backend.py",
    )
    assert found["strategy"] == "off"
    assert found["counters"]["bytes_avoided"] == 0


@pytest.mark.parametrize(
    ("has_plugins", "variables", "says"),
    [
        (True, {}, "a server started here takes exact"),
        (True, {"KVLAB_PATCH": "fast"}, "a server started here takes fast"),
        (True, {"KVLAB_PATCH": "off"}, "a server started here stays unpatched (KVLAB_PATCH=off)"),
        (True, {"SGLANG_PLUGINS": "other, kvlab"}, "a server started here takes exact"),
        (
            True,
            {"SGLANG_PLUGINS": "other"},
            "`python -m kvlab serve` takes exact (SGLANG_PLUGINS=other leaves kvlab out)",
        ),
        (False, {}, "`python -m kvlab serve` takes exact (this release loads no plugins)"),
        (
            True,
            {"KVLAB_PATCH_STRICT": "1"},
            "no server starts here (KVLAB_PATCH_STRICT, and fa3.decode is left alone)",
        ),
    ],
)
def test_status_says_what_a_restart_would_do(has_plugins, variables, says, sglang, run, monkeypatch):
    for name in ("KVLAB_PATCH", "KVLAB_PATCH_STRICT", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if has_plugins:
        (sglang / "sglang/srt/plugins").mkdir()
    info = sglang / "kvlab-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlab\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nkvlab = kvlab.patch.plugin:register\n", encoding="utf-8"
    )
    words = run(sglang, "patch", "status").stdout
    assert words.splitlines()[0].endswith(says)
    assert "flashinfer_mla.decode: recognised\n" in words
    found = json.loads(run(sglang, "patch", "status", "--json").stdout)["planned"]
    assert found["strategy"] == variables.get("KVLAB_PATCH", "exact")
    assert (found["by"] is None) is ("KVLAB_PATCH=off" in says or "no server" in says)


@pytest.mark.parametrize("wrong", [{"KVLAB_PATCH": "exakt"}, {"KVLAB_PATCH_STRICT": "perhaps"}])
def test_status_refuses_variables_that_no_server_starts_with(wrong, sglang, run, monkeypatch):
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    done = run(sglang, "patch", "status")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert next(iter(wrong)) in done.stderr


def test_a_misspelt_variable_is_told(sglang, run, monkeypatch, caplog):
    from kvlab.patch import api

    for name in variables.SERVER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVLAB_STRICT", "1")
    monkeypatch.setenv("KVLAB_CACHE", "x")
    says = "KVLAB_STRICT is no variable of kvlab's; is KVLAB_PATCH_STRICT meant?"
    assert run(sglang, "patch", "status").stdout.splitlines()[1] == f"  {says}"
    assert json.loads(run(sglang, "patch", "status", "--json").stdout)["planned"]["misspelt"] == [says]
    # And in the log of a server, once a process.
    monkeypatch.setattr(api, "_said_misspelt", set())
    for _ in range(2):
        api.apply("off")
        api.remove()
    assert caplog.messages == [f"kvlab: {says}"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVLAB_PACTH", "KVLAB_PATCH"),
        ("kvlab_patch", "KVLAB_PATCH"),
        ("KVLABPATCH", "KVLAB_PATCH"),
        ("KVLAB_PATCH_STRCT", "KVLAB_PATCH_STRICT"),
        ("KVLAB_RUNDIR", "KVLAB_RUN_DIR"),
        ("KVLAB_CASHE", "KVLAB_CACHE"),
        ("KVLAB_DATA", None),
        ("KVLAB_CACHE", None),
        ("KVLAB_SITE_NAME", None),
        ("KV_CACHE_DTYPE", None),
        ("SGLANG_PATCH", None),
    ],
)
def test_only_what_is_nearly_ours_is_misspelt(name, meant):
    from kvlab.patch import policy

    assert [line.split("is ")[-1].split()[0] for line in policy.misspelt([name])] == [meant][
        : meant is not None
    ]


def test_every_variable_that_is_read_anywhere_is_declared():
    """Else a new one would be called a misspelt old one. Strings and keywords of the package's code."""
    from kvlab.patch import policy

    read = set()
    for path in Path(kvlab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.value if isinstance(node, ast.Constant) else getattr(node, "arg", None)
            if isinstance(name, str) and re.fullmatch("KVLAB_[A-Z_]+", name) and path.stem != "variables":
                read.add(name)
    declared = {**variables.SERVER, **variables.OTHERS}
    assert read == declared.keys()
    assert policy.misspelt(declared) == []


def test_a_server_started_from_an_sglang_that_is_not_there(tmp_path, run, no_sglang, monkeypatch):
    monkeypatch.delenv("KVLAB_PATCH", raising=False)
    words = run(tmp_path, "patch", "status").stdout
    assert words == "SGLang: a server started here stays unpatched (no SGLang is installed here)\n"


def test_a_checkout_on_the_path_is_no_plugin(sglang, monkeypatch):
    from kvlab.patch import planned, sites

    for name in ("KVLAB_PATCH", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    (sglang / "sglang/srt/plugins").mkdir()
    root = sglang / "sglang"
    monkeypatch.setattr(planned, "entry_points", lambda **_: ())
    found = planned.planned(sites.Installed("0.5.23", root, tuple(sites.find(root))))
    assert (found["strategy"], found["by"]) == ("exact", "kvlab serve")
    assert "not installed" in found["reason"]


def test_the_command_line_without_what_it_is_made_with():
    code = "import sys, runpy; sys.modules['typer'] = None; runpy.run_module('kvlab', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "typer is not installed" in done.stderr
    assert "pip install typer rich msgspec" in done.stderr


def test_serve_runs_the_launcher_patched_with_its_own_arguments(sglang):
    done = spawn(sglang, "serve", "--model-path", "m", "--tp", "2", KVLAB_PATCH="shadow")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["argv"][1:] == ["--model-path", "m", "--tp", "2"]
    assert said["patched"] is True
    assert said["strategy"] == "shadow"
    # Spawned children import this main module by its name, and find nothing to run twice.
    assert said["main"] == "sglang.launch_server"


def test_strict_serve_refuses_what_it_does_not_recognise(sglang):
    done = spawn(sglang, "serve", KVLAB_PATCH_STRICT="1")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "KVLAB_PATCH_STRICT" in done.stderr
    assert "this release has no srt/layers/attention/flashattention_backend.py" in done.stderr


def test_a_mistyped_strategy_is_one_line_and_exit_2(sglang, run, monkeypatch):
    monkeypatch.setenv("KVLAB_PATCH", "fasst")
    done = run(sglang, "serve")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'fasst' is not a strategy" in done.stderr


def test_the_diff_applies_and_compiles(sglang, run):
    done = run(sglang, "patch", "diff")
    assert done.returncode == 0, done.stderr
    applied = subprocess.run(
        ["patch", "-p1", "--dry-run", "-d", str(sglang)], input=done.stdout, capture_output=True, text=True
    )
    assert applied.returncode == 0, applied.stdout + applied.stderr
    subprocess.run(["patch", "-p1", "-s", "-d", str(sglang)], input=done.stdout, text=True, check=True)
    text = (sglang / "sglang/srt/layers/attention/flashinfer_mla_backend.py").read_text(encoding="utf-8")
    compile(text, "edited", "exec")
    assert text.count("cast_active_rows(") == 2
    assert ".to(" not in text.replace("torch.", "")
    # The seam sees that there is nothing left to do.
    states = json.loads(run(sglang, "patch", "status", "--json").stdout)["sites"]
    assert "already fixed" in next(s for s in states if s["site"] == "flashinfer_mla.decode")["reason"]


def test_without_sglang(tmp_path, run, no_sglang):
    for args in (("patch", "diff"), ("serve",)):
        done = run(tmp_path, *args)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "sglang: not installed" in done.stderr


# A server.


class Server(http.server.BaseHTTPRequestHandler):
    """Answers /generate with tokens that depend on the prompt, and on `shift` as another server would."""

    shift = 0
    is_random = False
    key = None
    prefill_seconds = step_seconds = 0.0
    ranks = 1
    turn = 0

    def do_GET(self):
        self.answer({"dp_size": type(self).ranks} if self.path == "/server_info" else {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, n = asked["input_ids"], asked["sampling_params"]["max_new_tokens"]
        assert asked["sampling_params"]["temperature"] == 0
        time.sleep(type(self).prefill_seconds + n * type(self).step_seconds)
        out = [(sum(ids) * (i + 1)) % 997 for i in range(n)]
        if len(ids) > 100 and n > 3:
            out[3] += type(self).shift
        if type(self).is_random:
            out[0] = type(self).counter = getattr(type(self), "counter", 0) + 1
        if type(self).ranks > 1:
            # Ranks take turns, and one that has not seen a prompt answers from its wide rows.
            type(self).turn += 1
            seen = type(self).seen[type(self).turn % type(self).ranks]
            out[0] += len(ids) not in seen
            seen.add(len(ids))
        self.answer({"output_ids": out, "text": ""})

    def answer(self, found):
        body = json.dumps(found).encode()
        right = type(self).key is None or self.headers["Authorization"] == f"Bearer {type(self).key}"
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        return


@pytest.fixture
def server():
    class Mine(Server):
        pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mine) as it:
        thread = threading.Thread(target=it.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{it.server_port}", Mine
        it.shutdown()
        thread.join()


def test_verify_before_and_after(server, sglang, tmp_path, run):
    url, kind = server
    saved = tmp_path / "before.json"
    first = run(sglang, "patch", "verify", "--url", url, "--save", str(saved), "--json")
    assert first.returncode == 0, first.stderr
    assert len(json.loads(first.stdout)["tokens"]) == len(verify.prompts())
    same = run(sglang, "patch", "verify", "--url", url, "--against", str(saved), "--json")
    assert same.returncode == 0
    found = json.loads(same.stdout)
    assert found["identical"] is True
    assert found["prompts"] == 4
    assert found["first_difference"] is None
    # Nobody patched was asked, neither then nor now.
    assert found["note"].startswith("no patched server both times")
    words = run(sglang, "patch", "verify", "--url", url, "--against", str(saved)).stdout
    assert "identical tokens on 4 prompts" in words
    assert words.endswith("this says nothing of the patch\n")
    kind.shift = 1
    other = run(sglang, "patch", "verify", "--url", url, "--against", str(saved), "--json")
    assert other.returncode == 1
    assert json.loads(other.stdout)["first_difference"] == [2, 3]


def test_the_verdict_names_what_served(server, sglang, tmp_path, run):
    url, kind = server
    saved = tmp_path / "before.json"
    run(sglang, "patch", "verify", "--url", url, "--save", str(saved))
    (sglang / "run").mkdir()
    now = said(os.getpid(), server={"port": verify.port_of(url)})
    (sglang / "run" / f"{os.getpid()}.json").write_text(json.dumps(now), encoding="utf-8")
    words = run(sglang, "patch", "verify", "--url", url, "--against", str(saved)).stdout
    assert " before (no patch seen), " in words
    assert words.endswith(" after (exact)\n")
    kind.shift = 1
    words = run(sglang, "patch", "verify", "--url", url, "--against", str(saved)).stdout
    assert words.startswith("tokens differ, first at (2, 3) on 4 prompts; ")
    assert "ask again with nothing else on its GPUs" in words


def test_where_nothing_can_be_saved_nothing_is_asked(server, sglang, tmp_path, run, monkeypatch):
    url, _ = server
    monkeypatch.setattr(verify, "measure", lambda *a: pytest.fail("asked"))
    for path in (tmp_path / "nowhere" / "x.json", tmp_path):
        done = run(sglang, "patch", "verify", "--url", url, "--save", str(path))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "cannot be written" in done.stderr


def test_the_step_is_a_token_s_time_without_the_way_to_the_first(server, tmp_path, monkeypatch):
    url, kind = server
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(verify, "_LENGTHS", (7, 33, 130))
    kind.prefill_seconds, kind.step_seconds = 0.6, 0.01
    # With the prefill in it, a step would take 200 ms at least.
    assert verify.measure(url, 3)["step_ms"] < 190


def test_verify_gives_the_key(server, tmp_path, monkeypatch, sglang, run):
    url, kind = server
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    kind.key = "secret"
    assert len(verify.measure(url, 4, "secret")["tokens"]) == 4
    with pytest.raises(BadInput, match=r"--api-key: .* asks for the key that it was started with"):
        verify.measure(url, 4)
    monkeypatch.setenv("KVLAB_API_KEY", "other")
    done = run(sglang, "patch", "verify", "--url", url)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "takes another key" in done.stderr


def test_verify_lets_every_data_parallel_rank_see_a_prompt_first(server, tmp_path, monkeypatch):
    url, kind = server
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    kind.ranks, kind.seen = 3, [set(), set(), set()]
    assert len(verify.measure(url, 4)["tokens"]) == 4


def whole(body):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


# What answers at a port that is not an SGLang server's, or at that of one that is ill.
ANSWERS = {
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer .it speaks no HTTP"),
    "half an answer": (whole(b'{"output_ids": [1]}')[:-4], "does not answer .4 bytes of the answer"),
    "an endless header": (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000, "does not answer"),
    "a status that is none": (b"HTTP/1.1 abc OK\r\n\r\n", "does not answer .it speaks no HTTP"),
    "chunks that are none": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "does not answer .it speaks no HTTP",
    ),
    "JSON nested deep": (whole(b"[" * 20_000), "does not answer .its JSON is nested too deep"),
    "too much": (b"HTTP/1.1 200 OK\r\n\r\n" + b"1" * 200_000, "more than 0 MiB of an answer"),
    "yes and no": (whole(b'{"output_ids": [true, false]}'), "answered without output_ids"),
    "no tokens": (whole(b'{"output_ids": [], "dp_size": 1000000000}'), "answered 0 tokens, asked for 4"),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_whatever_answers_there_is_one_line(what, tmp_path, monkeypatch):
    answer, says = ANSWERS[what]

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            head = b""
            while b"\r\n\r\n" not in head and (part := self.request.recv(1 << 16)):
                head += part
            if (length := re.search(rb"Content-Length: (\d+)", head)) is not None:
                missing = int(length[1]) - len(head.split(b"\r\n\r\n", 1)[1])
                while missing > 0 and (part := self.request.recv(1 << 16)):
                    missing -= len(part)
            with contextlib.suppress(OSError):
                self.request.sendall(answer)

    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(verify, "_MOST_BYTES", 150_000)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as it:
        thread = threading.Thread(target=it.serve_forever, args=(0.01,))
        thread.start()
        try:
            with pytest.raises(BadInput, match=says) as refused:
                verify.measure(f"http://127.0.0.1:{it.server_address[1]}", 4)
        finally:
            it.shutdown()
            thread.join()
    assert "\n" not in str(refused.value)


def test_a_server_on_this_host_is_not_asked_through_a_proxy(server, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert len(verify.measure(server[0], 4)["tokens"]) == 4


def test_an_answer_that_never_ends_is_given_up(server, tmp_path, monkeypatch):
    url, kind = server

    def drip(self, found):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(200):
                self.wfile.write(b" ")
                time.sleep(0.02)

    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(verify, "_TIMEOUT", 0.1)
    kind.answer = drip
    with pytest.raises(BadInput, match=r"no whole answer in 0\.1 s"):
        verify._generate(url, [1], 4, None)


@pytest.mark.parametrize("change", [{"tokens": 5}, {"tokens": [5]}, {"step_ms": "x"}, {"patch": 1}])
def test_a_saved_file_of_another_shape_is_refused(change, tmp_path):
    path = tmp_path / "x.json"
    good = {"tokens": [[1]], "step_ms": 1.0, "new_tokens": 4, "patch": None}
    path.write_text(json.dumps(good), encoding="utf-8")
    assert verify.load(path) == good
    path.write_text(json.dumps(good | change), encoding="utf-8")
    with pytest.raises(BadInput, match="not a measurement of patch verify"):
        verify.load(path)


def test_verify_refuses_what_cannot_be_compared(server, tmp_path, monkeypatch):
    url, kind = server
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    kind.is_random = True
    with pytest.raises(BadInput, match="gives other greedy tokens each time"):
        verify.measure(url, 4)
    with pytest.raises(BadInput, match="does not answer"):
        verify.measure("http://127.0.0.1:9", 4)
    for url in ("nonsense", "http://127.0.0.1:99999", "http://[::1", "file:///etc/passwd"):
        with pytest.raises(BadInput, match="no server address"):
            verify.measure(url)
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BadInput, match="not a measurement of patch verify"):
        verify.load(tmp_path / "x.json")
    with pytest.raises(BadInput, match="No such file"):
        verify.load(tmp_path / "none.json")


def said(whose, **changes):
    return {
        "pid": whose,
        "started": runfiles._started(whose),
        "server": {"port": 30000, "tp_rank": 0},
        "sglang": "0.5.23",
        "sites": [{"site": "fa3.decode", "state": "patched", "reason": "", "line": 1}],
        "strategy": "exact",
        "chosen": {"fa3.decode": {"strategy": "shadow", "reason": ""}},
        "note": "",
        "scratch_bytes": 5,
        "counters": {"calls": {"fa3.decode": {"shadow": 7}}, "fallbacks": {"why": 1}, "bytes_avoided": 10},
        **changes,
    }


def test_status_of_a_running_server_sums_its_ranks(sglang, run):
    run_dir = sglang / "run"
    run_dir.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for pid, rank in ((os.getpid(), 1), (other.pid, 0)):
            text = json.dumps(said(pid, server={"port": 30000, "tp_rank": rank}))
            (run_dir / f"{pid}.json").write_text(text, encoding="utf-8")
        gone = run_dir / "999999999.json"
        gone.write_text(json.dumps(said(os.getpid(), pid=999999999, started="1")), encoding="utf-8")
        done = run(sglang, "patch", "status", "--url", "http://127.0.0.1:30000", "--json")
        assert done.returncode == 0, done.stderr
        other.communicate(b"\n")
    found = json.loads(done.stdout)
    assert found["counters"]["calls"] == {"fa3.decode": {"shadow": 14}}
    assert found["counters"]["fallbacks"] == {"why": 2}
    assert found["counters"]["bytes_avoided"] == 20
    assert [r["tp_rank"] for r in found["ranks"]] == [0, 1]
    # A process that is gone is no rank, and its file is swept.
    assert not gone.exists()
    words = run(sglang, "patch", "status", "--url", "http://127.0.0.1:30000").stdout
    assert "fa3.decode: patched with shadow" in words


def test_a_server_whose_patch_was_taken_out_runs_unpatched(sglang, run):
    (sglang / "run").mkdir()
    text = json.dumps(said(os.getpid(), strategy="off", chosen={}))
    (sglang / "run" / f"{os.getpid()}.json").write_text(text, encoding="utf-8")
    done = run(sglang, "patch", "status", "--url", "http://127.0.0.1:30000", "--json")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"runs unpatched: remove() was called in scheduler {os.getpid()}" in done.stderr
    assert json.loads(done.stdout)["strategy"] == "off"


def test_status_of_a_server_that_wrote_nothing(sglang, run):
    done = run(sglang, "patch", "status", "--url", "http://127.0.0.1:30001")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "nothing listens there" in done.stderr


def test_a_server_that_listens_and_wrote_nothing_runs_unpatched(server, sglang, run):
    done = run(sglang, "patch", "status", "--url", server[0])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "it runs unpatched" in done.stderr


def test_the_wrong_port_is_told_the_right_ones(sglang, run):
    (sglang / "run").mkdir()
    (sglang / "run" / f"{os.getpid()}.json").write_text(json.dumps(said(os.getpid())), encoding="utf-8")
    done = run(sglang, "patch", "status", "--url", "http://127.0.0.1:9")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nothing listens there" in done.stderr
    assert done.stderr.endswith("patched servers here have port 30000\n")


def test_a_scheduler_of_a_container_keeps_its_file(sglang, run):
    """A directory shared with a container: its process numbers are others' here."""
    (sglang / "run").mkdir()
    theirs = sglang / "run" / "7.json"
    theirs.write_text(json.dumps(said(7, started="1", namespace="pid:[1]")), encoding="utf-8")
    done = run(sglang, "patch", "status", "--url", "http://127.0.0.1:30000")
    assert done.returncode == 2
    assert "of another container has written there, ask inside it" in done.stderr
    assert theirs.exists()


def test_a_run_directory_of_another_user_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"{os.getpid()}.json").write_text(json.dumps(said(os.getpid())), encoding="utf-8")
    whose, another = (tmp_path / "run").owner(), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert runfiles.running() == []
    assert runfiles.elsewhere() == [f"{tmp_path / 'run'} belongs to user {whose}, ask as that user"]
    monkeypatch.setattr(Path, "stat", lambda *a, **k: (_ for _ in ()).throw(PermissionError("no")))
    assert runfiles.running() == []
    assert runfiles.elsewhere() == [f"{tmp_path / 'run'} is not for this user to look into"]


@pytest.mark.parametrize(
    "changes",
    [
        {"chosen": None},
        {"chosen": {"fa3.decode": "shadow"}},
        {"sites": "fa3.decode"},
        {"sites": [{"site": ["fa3.decode"], "state": "patched", "reason": ""}]},
        {"counters": {"calls": {"fa3.decode": {"shadow": {}}}, "fallbacks": {}, "bytes_avoided": 1}},
        {"note": 1, "kvlab": "9.9\nand more"},
    ],
    ids=str,
)
def test_a_server_of_another_kvlab_is_one_line(changes, sglang, run):
    (sglang / "run").mkdir()
    theirs = json.dumps(said(os.getpid(), **({"kvlab": "9.9"} | changes)))
    (sglang / "run" / f"{os.getpid()}.json").write_text(theirs, encoding="utf-8")
    for as_json in ([], ["--json"]):
        done = run(sglang, "patch", "status", "--url", "http://127.0.0.1:30000", *as_json)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "started with kvlab 9.9" in done.stderr
        assert "restart the server or ask with its version" in done.stderr


def test_status_names_the_rank_that_is_unlike_the_first(sglang, run):
    run_dir = sglang / "run"
    run_dir.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        chosen = {"fa3.decode": {"strategy": "stock", "reason": "not shadow: no"}}
        for pid, changes in (
            (os.getpid(), {"server": {"port": 30000, "tp_rank": 0}}),
            (other.pid, {"server": {"port": 30000, "tp_rank": 1}, "chosen": chosen}),
        ):
            (run_dir / f"{pid}.json").write_text(json.dumps(said(pid, **changes)), encoding="utf-8")
        words = run(sglang, "patch", "status", "--url", "http://localhost:30000").stdout
        other.communicate(b"\n")
    assert f"unlike the first, scheduler {other.pid}: exact; fa3.decode stock" in words


def test_status_says_where_two_servers_have_one_port():
    from kvlab.commands.patch import merged

    first, other = (said(pid, server={"port": 30000, "tp_rank": 0}) for pid in (os.getpid(), os.getppid()))
    assert merged([first])["note"] == ""
    assert merged([first, other])["note"] == "2 servers or Engines have that port: this is all of them"
    ranks = [said(os.getpid(), server={"port": 30000, "tp_rank": n}) for n in range(2)]
    assert merged(ranks)["note"] == ""


def test_status_of_another_host_is_not_answered_from_this_one(sglang, run):
    (sglang / "run").mkdir()
    text = json.dumps(said(os.getpid()))
    (sglang / "run" / f"{os.getpid()}.json").write_text(text, encoding="utf-8")
    # TEST-NET-1: nobody's address.
    done = run(sglang, "patch", "status", "--url", "http://192.0.2.1:30000")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not on this host" in done.stderr
    assert verify.local_status("http://192.0.2.1:30000") is None
    assert verify.local_status("http://127.0.0.1:30000")["pid"] == os.getpid()


def test_a_service_without_a_runtime_dir_is_found_from_a_shell_with_one(tmp_path, monkeypatch):
    monkeypatch.delenv("KVLAB_RUN_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    there = runfiles.run_dirs()[0]
    assert there == tmp_path / f"kvlab-{os.getuid()}"
    there.mkdir()
    (there / f"{os.getpid()}.json").write_text(json.dumps(said(os.getpid())), encoding="utf-8")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "shell"))
    assert runfiles.run_dirs()[0] == tmp_path / "shell" / "kvlab"
    assert [s["pid"] for s in runfiles.running(30000)] == [os.getpid()]
    # A folder of somebody else's, where ours would be, is not read.
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    there.rename(tmp_path / f"kvlab-{os.getuid()}")
    assert runfiles.running(30000) == []


def test_a_run_file_is_whole_and_private(tmp_path, monkeypatch, caplog):
    from kvlab.patch.runtime import Runtime

    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path / "run"))
    runtime = Runtime("exact", is_strict=False, version="0.5.23")
    file = runfiles.RunFile(lambda: {"sglang": "0.5.23", "counters": {}}, runtime)
    file.changed(True)
    assert not (tmp_path / "run").exists()  # a process that serves nothing writes nothing
    runtime.server = {"port": 30000}
    file.changed(True)
    assert [f.name for f in (tmp_path / "run").iterdir()] == [f"{os.getpid()}.json"]
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
    assert runfiles.running(30000)[0]["sglang"] == "0.5.23"
    assert runfiles.running(30001) == []
    assert runfiles.running()[0]["kvlab"] == kvlab.__version__
    (tmp_path / "run" / f"{os.getpid()}.json").unlink()
    monkeypatch.setattr(Path, "write_text", lambda *a, **k: (_ for _ in ()).throw(OSError("full")))
    caplog.clear()
    file.changed(True)  # no room: given up in one line, nothing raised
    file.changed(True)
    assert list((tmp_path / "run").iterdir()) == []
    assert caplog.messages == ["kvlab: no status for `kvlab patch status --url`: OSError: full"]


def test_steps_are_told_by_a_thread_that_ends_with_its_file(tmp_path, monkeypatch):
    """No step waits for a disk, and the last ones are told too."""
    from kvlab.patch.runtime import Runtime

    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(runfiles, "_SECONDS", 0.02)
    runtime = Runtime("exact", is_strict=False, version="0.5.23")
    steps, tellers = [0], []

    def status():
        tellers.append(threading.current_thread())
        # A dictionary may grow while it is read.
        if len(tellers) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return {"steps": steps[0]}

    file = runfiles.RunFile(status, runtime)
    file.changed(False)
    assert file._thread is None, "nothing is served"
    runtime.server = {"port": 30000}
    for _ in range(3):
        steps[0] += 1
        file.changed(False)
        wait_until(lambda: [s["steps"] for s in runfiles.running(30000)] == steps)
    thread = file._thread
    assert set(tellers) == {thread}
    told = len(tellers)
    time.sleep(0.1)
    assert len(tellers) == told, "nothing new, nothing written"
    file._is_over = True
    wait_until(lambda: not thread.is_alive())
    # As in a forked child, where it has not survived.
    file._is_over, file._thread_pid = False, 0
    file.changed(False)
    thread = file._thread
    assert thread.is_alive()
    del file
    gc.collect()
    wait_until(lambda: not thread.is_alive())


def test_what_is_told_last_stays(tmp_path, monkeypatch):
    """A thread that had begun to write when the patch was taken out has not the last word, nor has a hook
    that somebody else's wrapper still calls.
    """
    from kvlab.patch.runtime import Runtime

    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(runfiles, "_SECONDS", 0.01)
    runtime = Runtime("exact", is_strict=False, version="0.5.23")
    runtime.server = {"port": 30000}
    begun, strategy, here = threading.Event(), ["exact"], threading.current_thread()

    def status():
        said = {"strategy": strategy[0]}
        if threading.current_thread() is not here:
            begun.set()
            time.sleep(0.3)
        return said

    file = runfiles.RunFile(status, runtime)
    file.changed(False)
    assert begun.wait(10)
    strategy[0] = "off"
    file.end()
    assert [s["strategy"] for s in runfiles.running(30000)] == ["off"]
    # Applied anew: the file is the next one's.
    runfiles.RunFile(lambda: {"strategy": "fast"}, runtime).changed(True)
    file.changed(True)
    file.changed(False)
    file.end()
    time.sleep(0.4)
    assert [s["strategy"] for s in runfiles.running(30000)] == ["fast"]


@pytest.mark.parametrize("what", ["a disk", "a thread", "status"])
def test_what_cannot_be_told_costs_no_step_and_leaves_nothing(what, tmp_path, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise {"a disk": OSError("full"), "a thread": RuntimeError("no threads"), "status": TypeError("?")}[
            what
        ]

    from kvlab.patch.runtime import Runtime

    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(runfiles, "_SECONDS", 0.01)
    runtime = Runtime("exact", is_strict=False, version="0.5.23")
    runtime.server = {"port": 30000}
    status = {}
    file = runfiles.RunFile(lambda: status or fail(), runtime)
    status["steps"] = 1
    file.changed(True)
    assert len(runfiles.running(30000)) == 1
    if what == "status":
        status.clear()
    else:
        monkeypatch.setattr(*((Path, "replace") if what == "a disk" else (threading.Thread, "start")), fail)
    file.changed(False)
    wait_until(lambda: caplog.messages)
    # Neither figures that are no longer true nor half a file.
    assert list(tmp_path.iterdir()) == []
    file.changed(False)
    file.changed(True)
    assert len(caplog.messages) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_was_full_is_tried_again_ever_more_rarely(tmp_path, monkeypatch, caplog):
    from kvlab.patch.runtime import Runtime

    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    now, tries, is_full = [1000.0], [], True

    def replace(part, path):
        tries.append(now[0])
        if is_full:
            raise OSError("full")
        return os.replace(part, path)

    monkeypatch.setattr(Path, "replace", replace)
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr(runfiles, "time", clock)
    runtime = Runtime("exact", is_strict=False, version="0.5.23")
    runtime.server = {"port": 30000}
    file = runfiles.RunFile(lambda: {"steps": 7}, runtime)
    while now[0] < 20_000:
        file.changed(True)
        now[0] += 10
    waits = [after - before for before, after in itertools.pairwise(tries)]
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600, 3600]
    assert (list(tmp_path.iterdir()), len(caplog.messages)) == ([], 1)
    is_full = False
    now[0] += 3600
    file.changed(True)
    assert [s["steps"] for s in runfiles.running(30000)] == [7]
    is_full = True
    told = len(tries)
    file.changed(True)
    now[0] += 61
    file.changed(True)
    assert len(tries) == told + 2, "a new failure is waited for anew"


def test_what_a_killed_process_had_not_renamed_is_swept(tmp_path, monkeypatch):
    from kvlab.patch.runtime import Runtime

    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    before = time.time() - 3600
    # Killed; writing still, however slowly; of a container that shares the folder, at it; nobody's number.
    for name, written in ((gone.pid, before), (1, before), ("900000000", None), ("x", before)):
        part = tmp_path / f".{name}.part"
        part.write_text("{")
        if written is not None:
            os.utime(part, (written, written))
    runtime = Runtime("exact", is_strict=False, version="0.5.23")
    runtime.server = {"port": 30000}
    file = runfiles.RunFile(dict, runtime)
    file.changed(True)
    assert {f.name for f in tmp_path.iterdir()} == {".1.part", ".900000000.part", f"{os.getpid()}.json"}


def test_a_process_that_ends_while_it_is_told_of_leaves_no_file(tmp_path):
    """Python stops its thread wherever that is."""
    code = """
import sys, time, types
from pathlib import Path
from kvlab.patch import runfiles

runfiles._SECONDS, replace = 0.01, Path.replace

def slowly(self, target):
    print("begun", flush=True)
    time.sleep(0.3)
    return replace(self, target)

file = runfiles.RunFile(dict, types.SimpleNamespace(server={"port": 1}))
file.changed(True)
Path.replace = slowly
file.changed(False)
time.sleep(0.15)
"""
    env = os.environ | {"KVLAB_RUN_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n", "")
    assert list(tmp_path.iterdir()) == []


def wait_until(is_so):
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("never so")


OTHER_TEXTS = ["", "[]", "3", '{"pid": 1}', '{"pid": 1, "started": "1", "server": null}', "[" * 99_999]


@pytest.mark.parametrize("text", OTHER_TEXTS, ids=lambda text: text[:9])
def test_a_file_that_no_scheduler_wrote_is_passed_over(text, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    assert runfiles.running() == []


def test_what_is_no_file_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    assert runfiles.running() == []


def test_a_scheduler_that_ended_is_gone_before_its_launcher_has_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as it:
        (tmp_path / f"{it.pid}.json").write_text(json.dumps(said(it.pid)), encoding="utf-8")
        assert [s["pid"] for s in runfiles.running(30000)] == [it.pid]
        it.stdin.close()
        # Not waited for: its number stays taken.
        wait_until(lambda: "Z" in Path(f"/proc/{it.pid}/stat").read_text(encoding="utf-8").split())
        assert runfiles.running(30000) == []


def test_the_entry_point_is_the_one_that_sglang_loads():
    from importlib.metadata import entry_points

    text = textwrap.dedent((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert '[project.entry-points."sglang.srt.plugins"]\nkvlab = "kvlab.patch.plugin:register"' in text
    for entry in entry_points(group="sglang.srt.plugins", name="kvlab"):
        assert callable(entry.load())
