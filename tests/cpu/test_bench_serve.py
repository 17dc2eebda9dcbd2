"""`kvlab bench serve` against a stand-in SGLang: servers are started, asked, loaded and ended."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from kvlab import dummy, models
from kvlab.bench import seeded, serve, serve_requests, serve_server
from kvlab.bench.serve_results import Served, ServeRun, joined, write
from kvlab.errors import BadInput
from kvlab.patch import verify
from kvlab.provenance import collect

FAKES = Path(__file__).resolve().parents[1] / "fakes"
SHORT = ["--concurrency", "3", "--input-tokens", "8", "--output-tokens", "4", "--requests", "3"]
ASKED = ["--concurrency", "1,4", "--input-tokens", "16", "--output-tokens", "8"]


@pytest.fixture
def model(tmp_path):
    return dummy.write_rank(tmp_path / "rank", dummy.rank_config(models.load("glm-5"), layers=2))


def run(*words, mode="", **env):
    path = [str(FAKES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "kvlab", "bench", "serve", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "FAKE_SGLANG": mode, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_each_strategy_has_its_server_its_tokens_and_its_loads(model, tmp_path):
    out = tmp_path / "serve.json"
    given = ["--strategies", "off,exact,control_bf16", "--out", out, "--json", *ASKED]
    done = run("--model-path", model, *given, "--", "--kv-cache-dtype", "fp8_e4m3", "--page-size", "1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == json.loads(out.read_text())
    off, exact, control = said["servers"]
    assert [s["strategy"] for s in said["servers"]] == ["off", "exact", "control_bf16"]
    assert [s["same_tokens"] for s in said["servers"]] == [None, True, True]
    for server in said["servers"]:
        assert server["error"] is None
        assert server["memory"]["token_capacity"] == 4096
        assert [one["concurrency"] for one in server["loads"]] == [1, 4]
        assert [one["requests"] for one in server["loads"]] == [4, 8]
        for one in server["loads"]:
            assert one["completed"] == one["requests"]
            # The stand-in sleeps this long a token. Who sees the first one late sees the others soon.
            sleeps = 4.0 if server["strategy"] in ("off", "control_bf16") else 1.0
            after_first = one["output_tokens"] - 1
            # 99th percentiles of a few requests lie a little below the slowest one.
            slowest = one["ttft_ms_p99"] + one["tpot_ms_p99"] * after_first
            assert 0.9 * sleeps * after_first <= slowest <= 2e3 * one["seconds"]
            per_second = one["completed"] * one["output_tokens"] / one["seconds"]
            assert one["output_tokens_per_s"] == pytest.approx(per_second)
    assert "KVLAB_PATCH off" in off["log_lines"][0]
    assert "KVLAB_PATCH exact" in exact["log_lines"][0]
    assert "--load-format dummy" in exact["log_lines"][0]
    assert "--kv-cache-dtype fp8_e4m3" in exact["log_lines"][0]
    assert "--kv-cache-dtype" not in control["log_lines"][0]
    assert "KVLAB_PATCH off" in control["log_lines"][0]
    assert str(tmp_path) not in json.dumps({**said, "servers": []})


def test_other_tokens_and_servers_that_die_are_said(model):
    done = run("--model-path", model, "--strategies", "off,exact", "--json", *SHORT, mode="differs")
    assert [s["same_tokens"] for s in json.loads(done.stdout)["servers"]] == [None, False]
    done = run("--model-path", model, "--strategies", "off,exact", "--json", *SHORT, mode="dies")
    off, exact = json.loads(done.stdout)["servers"]
    assert done.returncode == 1
    assert off["error"] is None
    assert exact["error"] == "did not come up: RuntimeError: no memory for the pool"
    done = run("--model-path", model, "--strategies", "off", *SHORT, mode="fails")
    assert done.returncode == 1
    assert "requests completed at concurrency" in done.stderr


def test_servers_that_start_together_are_loaded_one_by_one(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setenv("FAKE_SGLANG", "dies")
    monkeypatch.setattr(sys, "argv", ["kvlab", "bench", "serve", "--", "--api-key=secret"])
    seen = []

    def up(server):
        seen.append([server.strategy, *(s.strategy for s in started if serve_server.answers(s.url))])

    started = []
    real = serve.launched
    monkeypatch.setattr(serve, "launched", lambda server: (started.append(server), real(server))[1])
    run = serve.measure(
        model,
        ["off", "control_bf16", "exact"],
        serve.Asked([2], 8, 4, 2),
        server_args=["--api-key=secret", "--tp", "1"],
        together=2,
        apart=0.1,
        then=up,
    )
    assert [s.strategy for s in run.servers] == ["off", "control_bf16", "exact"]
    # The second of a group runs while the first is loaded; the first has ended when the second is.
    assert seen == [["off", "off", "control_bf16"], ["control_bf16", "control_bf16"]]
    assert run.server_args == ["--tp", "1"]
    assert run.provenance.command.endswith("--api-key=KEY")
    assert [s.gpu_peak_bytes for s in run.servers] == [None, None, None]
    assert [bool(s.loads) for s in run.servers] == [True, True, False]
    assert run.servers[2].error == "did not come up: RuntimeError: no memory for the pool"
    assert not any(serve_server.answers(s.url) for s in started)


def test_an_argument_is_found_and_left_out_however_it_is_written():
    given = ["--tp", "1", "--api-key=a", "--api-key", "b", "--kv-cache-dtype=fp8_e4m3"]
    assert serve_server.without(given, "--api-key") == ["--tp", "1", "--kv-cache-dtype=fp8_e4m3"]
    assert serve_server.without(given[:3], "--kv-cache-dtype") == given[:3]
    assert serve_server.value_of(["--api-key=a", "--tp", "1"], "--api-key") == "a"
    assert serve_server.value_of(["--api-key=a", "--api-key", "b"], "--api-key") == "b"
    assert serve_server.value_of(["--api-key", "b", "--api-key=a"], "--api-key") == "a"
    assert serve_server.value_of(["--tp", "1"], "--api-key") is None


def test_a_strategy_may_come_twice_and_the_control_has_no_fp8_cache(tmp_path):
    given = ["--kv-cache-dtype=fp8_e4m3", "--tp", "1"]
    servers = [
        serve_server.server_for(tmp_path, n, given, "python", 1, tmp_path, False) for n in ("off", "off")
    ]
    assert len({s.work for s in servers}) == 2
    control = serve_server.server_for(tmp_path, serve.CONTROL, given, "python", 1, tmp_path, False).command()
    assert [a for a in control if "kv-cache" in a] == []
    assert "--kv-cache-dtype=fp8_e4m3" in servers[0].command()


def test_a_free_port_leaves_room_for_those_that_sglang_derives():
    ports = [serve_server.free_port() for _ in range(50)]
    assert len(set(ports)) > 40
    assert max(ports) + 10_000 < 65_536
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        assert serve_server.free_port() != ports[0]


def test_no_server_is_left_behind(model, tmp_path):
    server = serve.Server(model, "off", [], sys.executable, serve_server.free_port(), tmp_path, True)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(FAKES)
    try:
        with serve.launched(server) as it:
            (ready,) = serve_server.all_ready([it], 30)
            assert ready is not None
            assert verify.info_of(server.url)["model_path"] == str(model)
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    time.sleep(0.1)
    assert verify.info_of(server.url) is None


def test_a_running_server_is_loaded_by_its_address(model):
    port = serve_server.free_port()
    env = {**os.environ, "PYTHONPATH": str(FAKES)}
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), "--model-path", str(model)]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            until = time.perf_counter() + 30
            while not serve_server.answers(url) and time.perf_counter() < until:
                time.sleep(0.1)
            done = run("--url", url, "--json", "--api-key", "s3cret", *SHORT)
            assert done.returncode == 0, done.stderr
            assert "s3cret" not in done.stdout + done.stderr
            (only,) = json.loads(done.stdout)["servers"]
            assert [one["completed"] for one in only["loads"]] == [3]
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --model-path FOLDER, --url of a running server, or --join FILE"),
        (["--model-path", "RANK", "--url", "http://127.0.0.1:1"], "or --join FILE"),
        (["--join", "/nowhere/x.json"], "--join: /nowhere/x.json: not a run of bench serve"),
        (["--model-path", "/nowhere"], "no config.json"),
        (["--model-path", "RANK", "--strategies", "exakt"], "--strategies: exakt; use exact, fast"),
        (["--model-path", "RANK", "--strategies", ""], "none given"),
        (["--model-path", "RANK", "--concurrency", "0"], "--concurrency: expected numbers"),
        (["--model-path", "RANK", "--out", "/nowhere/x.json"], "--out: /nowhere/x.json"),
        (["--url", "ftp://x"], "is no server address"),
        (["--url", "http://127.0.0.1:9"], "does not answer as an SGLang server"),
    ],
)
def test_bad_input_is_one_line(words, said, model, monkeypatch, capsys):
    from kvlab.cli import main

    monkeypatch.syspath_prepend(FAKES)
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", *(str(model) if w == "RANK" else w for w in words)])
    assert left.value.code == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1
    assert said in err


def test_the_generators_result_is_read_or_refused():
    asked = serve.Asked([1], 16, 8)
    with pytest.raises(BadInput, match="no result that is known"):
        serve_requests.parse("{}", asked, 1)
    with pytest.raises(BadInput, match="no result that is known"):
        serve_requests.parse("", asked, 1)


def test_the_seeding_plugin_is_an_installed_distribution(tmp_path):
    from importlib.metadata import distributions

    folder = seeded.plugin(tmp_path / "plugin")
    (found,) = distributions(path=[str(folder)])
    (entry,) = found.entry_points
    assert (entry.group, entry.name) == ("sglang.srt.plugins", "kvlab_seeded")
    assert entry.load() is seeded.install


def test_a_recorded_run_reads_back():
    run = ServeRun(provenance=collect(), model="m", server_args=[], seeded_dummy_weights=False, servers=[])
    assert msgspec.json.decode(msgspec.json.encode(run), type=ServeRun) == run


def test_runs_of_a_server_each_are_joined_where_they_are_alike(tmp_path):
    where = collect()

    def one(strategy, tokens, model="m", where=where):
        path = tmp_path / f"{strategy}-{model}.json"
        server = Served(strategy=strategy, tokens=tokens)
        write(
            path,
            ServeRun(
                provenance=where, model=model, server_args=[], seeded_dummy_weights=True, servers=[server]
            ),
        )
        return path

    off, exact, fast = one("off", [[1, 2]]), one("exact", [[1, 2]]), one("fast", [[1, 3]])
    run = joined([off, exact, fast])
    assert [(s.strategy, s.same_tokens) for s in run.servers] == [
        ("off", None),
        ("exact", True),
        ("fast", False),
    ]
    with pytest.raises(BadInput, match="other model"):
        joined([off, one("exact", [[1, 2]], model="n")])
    # Of other code, perhaps on another machine: its tokens are held against its own first server only.
    later = msgspec.structs.replace(where, commit="f" * 40)
    run = joined([off, one("exact", [[1, 4]], where=later)])
    assert [(s.same_tokens, s.provenance and s.provenance.commit) for s in run.servers] == [
        (None, None),
        (None, "f" * 40),
    ]
