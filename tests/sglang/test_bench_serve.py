"""SGLang's own load generator takes what `kvlab bench serve` gives it, and writes what that reads."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlab import dummy, models
from kvlab.bench import serve_requests, serve_server

HERE = Path(__file__).resolve().parent
# `datasets` is a dependency of SGLang that these environments go without: random ids need none.
DATASETS = "def load_dataset(*_, **__):\n    raise RuntimeError('not installed')\n"


def test_the_real_generator_loads_a_server(tmp_path):
    pytest.importorskip("aiohttp")
    model = dummy.write_rank(tmp_path / "rank", dummy.rank_config(models.load("glm-5"), layers=2))
    (tmp_path / "more" / "datasets").mkdir(parents=True)
    (tmp_path / "more" / "datasets" / "__init__.py").write_text(DATASETS)
    port = serve_server.free_port()
    url, out = f"http://127.0.0.1:{port}", tmp_path / "out.jsonl"
    asked = serve_requests.Asked([4], 16, 8)
    fake = {**os.environ, "PYTHONPATH": str(HERE.parent / "fakes")}
    started = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), "--model-path", str(model)]
    code = "import rig.environment; from kvlab.bench.serve_load import main; main()"
    real = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(tmp_path / "more")])}
    with (
        subprocess.Popen(started, env=fake, stdout=subprocess.DEVNULL) as server,
        contextlib.ExitStack() as ends,
    ):
        ends.callback(server.kill)
        until = time.perf_counter() + 30
        while not serve_server.answers(url) and time.perf_counter() < until:
            time.sleep(0.1)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            input=json.dumps(serve_requests.arguments(url, str(model), asked, 4, out)) + "\n",
            env=real,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=180,
        )
    assert done.stdout.strip() == "null", done.stderr[-2000:]
    load = serve_requests.parse(out.read_text(), asked, 4)
    assert (load.requests, load.completed) == (8, 8)
    # The stand-in sleeps a millisecond a token. On a busy host the client may read several at once, and late.
    assert 0 < load.tpot_ms_median <= load.tpot_ms_p99
    assert load.ttft_ms_p99 + (asked.output_tokens - 1) * load.tpot_ms_p99 >= asked.output_tokens
    assert load.seconds >= 2 * asked.output_tokens / 1000
