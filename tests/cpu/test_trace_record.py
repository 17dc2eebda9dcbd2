"""Recording from a real HTTP server that stands in for SGLang's endpoints, and around a stand-in benchmark.

What they answer is what SGLang 0.5.15.post1's http_server and one_batch do; neither is SGLang.
"""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvlab.cli import main
from kvlab.data import recorded
from kvlab.trace import read, report
from kvlab.trace.thin import leave_out, shorten_paths

REAL = recorded("h200-stock") / "decode.trace.json.gz"


class Server(ThreadingHTTPServer):
    """Writes a recorded trace where /start_profile says, once /generate streams."""

    daemon_threads = True

    def __init__(self, *, behave="well", ranks=1, key=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.ranks, self.key = behave, ranks, key
        self.calls, self.profiles, self.prompts = [], [], []
        self.decoding = threading.Event()
        self.profiled = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, body=b"ok", code=200):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def is_refused(self):
        if not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return False
        self.reply(b'{"error": "Unauthorized"}', 401)
        return True

    def do_GET(self):
        self.server.calls.append(self.path)
        if self.is_refused():
            return
        if self.path == "/server_info" and self.server.behave != "old":
            info = {
                "version": "0.5.15.post1",
                "attention_backend": "flashinfer",
                "kv_cache_dtype": "fp8_e4m3",
            }
            self.reply(json.dumps({**info, "model_path": "/secret/place", "api_key": "k"}).encode())
        elif self.path == "/get_server_info" and self.server.behave == "old":
            self.reply(json.dumps({"version": "0.5.9", "attention_backend": "fa3"}).encode())
        else:
            self.reply(b"no such path", 404)

    def do_POST(self):
        self.server.calls.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.is_refused():
            return
        if self.path == "/generate":
            self.server.prompts.append(json.loads(body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"text": "a"}\n')
            self.wfile.flush()
            self.server.decoding.set()
            self.server.profiled.wait(10)
            self.wfile.write(b"data: [DONE]\n")
        elif self.path == "/start_profile":
            self.server.profiles.append(json.loads(body))
            if self.server.behave == "busy":
                self.reply(b"Profiling is already in progress.", 400)
                return
            if self.server.behave == "well" or self.server.behave == "old":
                assert self.server.decoding.wait(10)
                self.write(Path(json.loads(body)["output_dir"]))
            self.server.profiled.set()
            self.reply(b"Start profiling.\n")
        elif self.path == "/stop_profile":
            self.reply(b"Stop profiling. This will take some time.\n")

    def write(self, folder):
        text = gzip.decompress(REAL.read_bytes())
        place = b'"name": "/home/me/env/lib/python3.12/site-packages/sglang/srt'
        text = text.replace(b'"name": "sglang/srt', place)
        text = text.replace(b'"threading.py(', b'"/usr/lib/python3.12/threading.py(', 1)
        for rank in range(self.server.ranks):
            path = folder / f"1719.5-TP-{rank}.trace.json.gz"
            packed = gzip.compress(text, 1)
            path.write_bytes(packed[:1000])
            threading.Thread(target=lambda p=path, b=packed: (time.sleep(0.3), p.write_bytes(b))).start()


@pytest.fixture
def server(request):
    made = Server(**getattr(request, "param", {}))
    yield made
    made.profiled.set()
    made.shutdown()
    made.server_close()


@pytest.fixture
def kvlab(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as e:
            main([str(a) for a in args])
        out, err = capsys.readouterr()
        return e.value.code, out, err

    return run


@pytest.mark.parametrize("server", [{"ranks": 2}], indirect=True)
def test_from_a_server(server, kvlab, tmp_path):
    out = tmp_path / "run"
    args = ("--url", server.url, "--out", out, "--steps", 3, "--requests", 2, "--patch", "off", "--shapes")
    code, said, err = kvlab("trace", "record", *args)
    assert (code, err) == (0, "")
    names = ["decode-TP00.trace.json.gz", "decode-TP01.trace.json.gz"]
    assert said.split() == [str(out / n) for n in names]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
    assert sorted(p.name for p in out.iterdir()) == sorted(["README.md", "provenance.json", *names])
    asked = server.profiles[0]
    assert (asked["num_steps"], asked["activities"], asked["record_shapes"]) == (3, ["CPU", "GPU"], True)
    assert not Path(asked["output_dir"]).exists()
    assert len({p["text"] for p in server.prompts}) == 2
    assert server.calls.index("/start_profile") > server.calls.index("/generate")
    assert "/stop_profile" not in server.calls
    assert report(read(out / names[0])).kv_cast.copies_per_step == 78
    kept = json.loads((out / "provenance.json").read_text())
    assert kept["server"] == {
        "version": "0.5.15.post1",
        "attention_backend": "flashinfer",
        "kv_cache_dtype": "fp8_e4m3",
    }
    assert kept["request"]["kvlab_patch_of_server"] == "off"
    assert kept["files"] == names
    assert kept["provenance"]["date"]
    text = gzip.decompress((out / names[0]).read_bytes())
    assert b"/home/me/" not in text
    assert b"/usr/" not in text
    assert text == gzip.decompress(REAL.read_bytes())
    assert "KVLAB_PATCH=off" in (out / "README.md").read_text()


@pytest.mark.parametrize("server", [{"behave": "old"}], indirect=True)
def test_an_older_server(server, kvlab, tmp_path):
    code, _, err = kvlab("trace", "record", "--url", server.url, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["server"]["version"] == "0.5.9"


@pytest.mark.parametrize(
    ("server", "said"),
    [({"behave": "busy"}, "already in progress"), ({"behave": "silent"}, "wrote no trace")],
    indirect=["server"],
)
def test_a_server_that_gives_no_trace(server, said, kvlab, tmp_path):
    code, out, err = kvlab(
        "trace", "record", "--url", server.url, "--out", tmp_path / "run", "--timeout", 0.5
    )
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err
    assert "/stop_profile" in server.calls  # nothing left running in a server that others use
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("server", [{"key": "s3cret"}], indirect=True)
def test_a_server_with_a_key(server, kvlab, tmp_path, monkeypatch):
    url = ("--url", server.url)
    monkeypatch.setattr("sys.argv", ["kvlab", "trace", "record", "--api-key", "s3cret"])
    for key, said in (((), "asks for the key"), (("--api-key", "other"), "does not take this key")):
        code, out, err = kvlab("trace", "record", *url, *key, "--out", tmp_path / "run")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"kvlab: --api-key: {server.url} {said}")
        assert list(tmp_path.iterdir()) == []
    code, _, err = kvlab("trace", "record", *url, "--api-key", "s3cret", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    for path in (tmp_path / "run").iterdir():
        content = path.read_bytes()
        assert b"s3cret" not in (gzip.decompress(content) if path.suffix == ".gz" else content)


def test_no_server_or_a_folder_that_exists(kvlab, tmp_path, server):
    code, _, err = kvlab("trace", "record", "--url", "http://127.0.0.1:9", "--out", tmp_path / "run")
    assert code == 2
    assert "no SGLang server answers at http://127.0.0.1:9" in err
    (tmp_path / "mine").touch()
    code, _, err = kvlab("trace", "record", "--url", server.url, "--out", tmp_path)
    assert code == 2
    assert "it exists and is not an empty folder; give a new folder" in err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


BENCH = """
import argparse, gzip, json, os, re, sys
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--result-filename")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profile-stage")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--no-trace", action="store_true")
    asked, _ = parser.parse_known_args()
    assert asked.profile and asked.profile_stage == "decode", sys.argv
    if asked.fail:
        sys.exit(3)
    from sglang.srt.model_loader import loader
    print("weights by", loader.initialize_dummy_weights.__module__)
    import torch.profiler
    print("frames", torch.profiler.profile(with_stack=True).with_stack)
    for batch in asked.batch_size if not asked.no_trace else []:
        name = f"profile_batch{{batch}}_input100_output8_decode.trace.json.gz"
        with open(asked.result_filename, "a") as f:
            f.write(json.dumps({{"batch_size": batch, "median_decode_latency": 0.07765}}) + "\\n")
        # The casts of a larger batch weigh less; here they are shorter instead.
        text = gzip.open({real!r}).read()
        text = re.sub(rb'"dur": (8\\d\\d[.]\\d+)', lambda m: b'"dur": %.3f' % (float(m[1]) / batch), text)
        with gzip.open(os.path.join(os.environ["SGLANG_TORCH_PROFILER_DIR"], name), "wb", 1) as f:
            f.write(text)
"""


@pytest.fixture
def one_batch(tmp_path):
    package = tmp_path / "lib" / "sglang" / "benchmark"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    loader = tmp_path / "lib" / "sglang" / "srt" / "model_loader"
    loader.mkdir(parents=True)
    (loader / "__init__.py").write_text("")
    (loader.parent / "__init__.py").write_text("")
    (loader / "loader.py").write_text("def initialize_dummy_weights(model):\n    pass\n")
    (package / "one_batch.py").write_text(BENCH.format(real=str(REAL)))
    where = tmp_path / "runs"
    where.mkdir()

    def run(*args, **env):
        command = [sys.executable, "-m", "kvlab", "trace", "record", "--out", str(where / "run"), *args]
        path = os.pathsep.join([str(tmp_path / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **env}
        )

    return run, where


def test_around_the_one_batch_benchmark(one_batch):
    run, where = one_batch
    done = run(
        "--one-batch", "--model-path /models/dummy --batch-size 1 --input-len 100", KVLAB_PATCH="exact"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(where / "run" / "decode.trace.json.gz")]
    kept = json.loads((where / "run" / "provenance.json").read_text())
    # A baseline with kvlab installed says that it was off, whatever the shell had.
    assert kept["provenance"]["kvlab_patch"] == "off"
    assert kept["request"]["arguments"][:2] == ["--model-path", "dummy"]
    assert report(read(where / "run" / "decode.trace.json.gz")).steps == 1
    assert "frames True" in done.stderr


def test_several_batches_are_recorded_by_one_process(one_batch):
    run, where = one_batch
    done = run("--one-batch", "--batch-size 1 16", "--seed", "3", "--no-stack", "--patch", "exact")
    assert done.returncode == 0, done.stderr
    names = ["decode-b1-c100.trace.json.gz", "decode-b16-c100.trace.json.gz"]
    assert done.stdout.split() == [str(where / "run" / n) for n in names]
    assert "weights by kvlab.dummy" in done.stderr
    assert "frames False" in done.stderr
    kept = json.loads((where / "run" / "provenance.json").read_text())
    assert (kept["provenance"]["kvlab_patch"], kept["patch"]["strategy"]) == ("exact", "exact")
    assert [r["batch_size"] for r in kept["results"]] == [1, 16]
    assert kept["request"]["seed"] == 3
    # Without Python frames; all else as it was.
    stock = json.loads(gzip.decompress(REAL.read_bytes()))["traceEvents"]
    kept = json.loads(gzip.decompress((where / "run" / names[0]).read_bytes()))["traceEvents"]
    assert kept == [e for e in stock if e.get("cat") != "python_function"]
    assert 0 < len(kept) < len(stock)


def test_two_recordings_may_take_turns(one_batch, tmp_path):
    run, where = one_batch
    turn = tmp_path / "turn"
    threading.Timer(3, turn.touch).start()
    started = time.monotonic()
    done = run("--one-batch", "--batch-size 1", KVLAB_BENCH_TURN=str(turn))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started >= 3
    assert report(read(where / "run" / "decode.trace.json.gz")).steps == 1


def test_a_trace_does_not_tell_where_it_was_written(tmp_path):
    source, kept = tmp_path / "a.json", tmp_path / "b.json.gz"
    source.write_text('{"traceEvents": [\n],\n"traceName": "/tmp/x y/tmpab1.json"\n}')
    shorten_paths(source, kept)
    assert json.loads(gzip.decompress(kept.read_bytes())) == {"traceEvents": [], "traceName": "tmpab1.json"}


def test_a_thin_trace_keeps_what_explains_kernels(one_batch, tmp_path):
    run, where = one_batch
    done = run("--one-batch", "--batch-size 1", "--thin")
    assert done.returncode == 0, done.stderr
    kept = where / "run" / "decode.trace.json.gz"
    assert kept.stat().st_size < 0.8 * REAL.stat().st_size
    thin, whole = (report(read(path)).to_dict() for path in (kept, REAL))
    assert {k: v for k, v in thin.items() if k != "file"} == {k: v for k, v in whole.items() if k != "file"}

    def event(cat, name, ts, dur, tid=1):
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}

    events = [
        event("cpu_op", "aten::to", 0, 10),
        event("cpu_op", "aten::view", 1, 1),
        event("cpu_op", "aten::copy_", 3, 6),
        event("cuda_runtime", "cudaLaunchKernel", 5, 1),
        event("cpu_op", "aten::add", 4, 3, tid=2),
        event("python_function", "step", 0, 20),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 1, "ts": 5},
        event("kernel", "copy", 7, 1, tid=7),
        {"ph": "M", "name": "process_name", "pid": 1},
    ]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events, "traceName": "a"}))
    leave_out(tmp_path / "a.json", tmp_path / "b.json.gz")
    left = json.loads(gzip.decompress((tmp_path / "b.json.gz").read_bytes()))
    names = ["aten::to", "aten::copy_", "cudaLaunchKernel", "copy", "process_name"]
    assert [e["name"] for e in left["traceEvents"]] == names
    assert left["traceName"] == "a"


def test_the_batch_whose_share_is_nearest_is_kept(one_batch):
    run, where = one_batch
    done = run("--one-batch", "--batch-size 1 2 4", "--nearest-share", "0.7")
    assert done.returncode == 0, done.stderr
    assert "weights by sglang" in done.stderr
    (path,) = (Path(line) for line in done.stdout.split())
    tries = json.loads((where / "run" / "provenance.json").read_text())["tries"]
    assert [t["batch"] for t in tries] == [1, 2, 4]
    assert [t["share"] for t in tries] == sorted((t["share"] for t in tries), reverse=True)
    assert report(read(path)).kv_cast.share == tries[1]["share"] == pytest.approx(0.743, abs=0.005)


@pytest.mark.parametrize(("flag", "said"), [("--fail", "exit code 3"), ("--no-trace", "wrote no trace")])
def test_a_benchmark_that_gives_no_trace(one_batch, flag, said):
    run, where = one_batch
    done = run("--one-batch", flag)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1]
    assert list(where.iterdir()) == []


def test_without_sglang_it_says_so(kvlab, tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = kvlab("trace", "record", "--one-batch", "", "--out", tmp_path / "run")
    assert code == 2
    assert "sglang is not installed" in err
