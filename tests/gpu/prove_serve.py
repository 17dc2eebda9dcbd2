"""kvlab merely installed, SGLang's own servers: is it in place, are tokens the same, what do faults do?

    python tests/gpu/prove_serve.py weights FOLDER [--layers 6] [--tp 8] [--nextn] [--dummy] [--split]
    python tests/gpu/prove_serve.py engines FOLDER OUT CASE… [--at-once 4]
    python tests/gpu/prove_serve.py http FOLDER OUT
    python tests/gpu/prove_serve.py loaded FOLDER OUT off,exact [--together 2]
    python tests/gpu/prove_serve.py judge OUT…

Each case is a process of its own with one `sglang.Engine` in it, as a user would write it; what differs is
environment variables and arguments. Requests go one after another, so that the composition of batches is the
same in every server; then some together. Servers of the `busy` cases answer while the others do: each prompt
some times, held against two quiet servers. `loaded` is `kvlab bench serve` of the whole depth, and an
operator's commands against each of its servers. Run it where the installed kvlab is found, not in a checkout.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serve_cases import CASES, NO_PLUGIN, OFF, POOL, Case
from serve_engine import one
from serve_judge import judged, without_paths
from serve_processes import end_group, environment, gpu, kvlab, plugin_folder, provenance, wait_ready

HERE = Path(__file__).resolve()


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    weights = commands.add_parser("weights")
    weights.add_argument("folder", type=Path)
    weights.add_argument("--model", default="glm-5")
    weights.add_argument("--layers", type=int, default=6)
    weights.add_argument("--tp", type=int, default=8)
    weights.add_argument("--nextn", action="store_true")
    weights.add_argument("--dummy", action="store_true")
    weights.add_argument("--split", action="store_true")
    for name in ("engines", "http", "one"):
        its = commands.add_parser(name)
        its.add_argument("folder", type=Path)
        its.add_argument("out", type=Path)
        if name == "engines":
            its.add_argument("cases", nargs="+", choices=CASES)
            its.add_argument("--at-once", type=int, default=4)
            its.add_argument("--timeout", type=float, default=150)
        elif name == "one":
            its.add_argument("case", choices=CASES)
    loaded = commands.add_parser("loaded")
    loaded.add_argument("folder", type=Path)
    loaded.add_argument("out", type=Path)
    loaded.add_argument("strategies")
    loaded.add_argument("--together", type=int, default=1)
    loaded.add_argument("--apart", type=float, default=20)
    loaded.add_argument("--pool", type=int, default=495_552)
    loaded.add_argument("--backend", default="flashinfer")
    judge = commands.add_parser("judge")
    judge.add_argument("out", type=Path, nargs="+")
    asked = parser.parse_args()
    does = {
        "weights": weights_of,
        "engines": engines,
        "http": http,
        "loaded": loads,
        "one": lambda its: one(its.folder, its.out, its.case),
        "judge": lambda its: judged(its.out),
    }
    return does[asked.command](asked) or 0


def weights_of(asked: argparse.Namespace) -> int:
    """One rank with real safetensors, or only its shape."""
    import torch

    from kvlab import checkpoint, dummy, models

    if (asked.folder / ("config.json" if asked.dummy else checkpoint.INDEX)).exists():
        return 0
    config = dummy.rank_config(models.load(asked.model), tp=asked.tp, layers=asked.layers)
    config["num_nextn_predict_layers"] = int(asked.nextn)
    if asked.split:
        config |= split(config)
    start = time.perf_counter()
    dummy.write_rank(asked.folder, config)
    if not asked.dummy:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        size = checkpoint.write_weights(asked.folder, device=device)
        print(f"{asked.folder}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s", flush=True)
    return 0


def split(config: dict[str, Any]) -> dict[str, Any]:
    """What makes a rank Sarvam's: the layers with MLA whose prefill SGLang runs a few at a time."""
    return {
        "architectures": ["SarvamMLAForCausalLM"],
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        "pad_token_id": config["eos_token_id"],
    }


def engines(asked: argparse.Namespace) -> int:
    """The cases, some at once on the same GPUs: a server that waits takes nothing from another."""
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "provenance.json").write_text(provenance() + "\n", encoding="utf-8")
    plugin = plugin_folder(out.parent / "plugin")
    waiting, live, failed = list(asked.cases), {}, 0
    while waiting or live:
        while waiting and len(live) < asked.at_once:
            name = waiting.pop(0)
            live[name] = (start_case(name, asked.folder, out, plugin), time.perf_counter())
        for name, (process, since) in list(live.items()):
            took = time.perf_counter() - since
            if process.poll() is None and took < asked.timeout:
                continue
            hangs = process.poll() is None
            left = end_group(process)
            done = {"case": name, "rc": process.returncode, "seconds": took, "hangs": hangs, "left": left}
            (out / f"{name}.end.json").write_text(json.dumps(done) + "\n", encoding="utf-8")
            print(json.dumps(done), flush=True)
            failed += bool(process.returncode)
            del live[name]
        time.sleep(0.2)
    judged([out])
    return 0


def start_case(name: str, folder: Path, out: Path, plugin: Path) -> subprocess.Popen[bytes]:
    with (out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE), "one", str(folder.resolve()), str(out), name],
            env=environment(CASES[name], name, out, plugin),
            cwd="/tmp",
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def http(asked: argparse.Namespace) -> int:
    """Four HTTP servers, asked from outside: off, installed, uninstalled, `kvlab serve` without plugin."""
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    base = 25_000 + 1600 * int(os.environ.get("JOB_SLOT", "0"))
    plugin = plugin_folder(out.parent / "plugin")
    launcher, ours = ["-m", "sglang.launch_server"], ["-m", "kvlab", "serve"]
    servers = {
        "off": (Case(OFF), launcher),
        "installed": (Case({}), launcher),
        "kvlab_serve": (Case(NO_PLUGIN), ours),
        "uninstalled": (Case({}), launcher),
    }
    live: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
    run = Path("/tmp") / f"kvlab-run-{os.getpid()}-http"
    shutil.rmtree(run, ignore_errors=True)
    found: dict[str, Any] = {}
    try:
        with gpu(fcntl.LOCK_SH):
            for number, (name, (case, command)) in enumerate(servers.items()):
                env = environment(case, name, out, plugin) | {"KVLAB_RUN_DIR": str(run)}
                if name == "uninstalled":
                    env["PYTHONPATH"] = os.pathsep.join(
                        p for p in env["PYTHONPATH"].split(os.pathsep) if "site-kvlab" not in p
                    )
                port = base + 400 * number
                flags = (
                    f"--model-path {asked.folder.resolve()} --attention-backend flashinfer --kv-cache-dtype "
                    f"fp8_e4m3 --max-total-tokens {POOL} --max-running-requests 16 --cuda-graph-max-bs 16 "
                    f"--mem-fraction-static 0.8 --grammar-backend none --port {port}"
                ).split()
                with (out / f"{name}.log").open("wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, *command, *flags],
                        env=env,
                        cwd="/tmp",
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                live[name] = (process, f"http://127.0.0.1:{port}")
            for name, (process, url) in live.items():
                found[name] = {"url": url, "ready": wait_ready(process, url, 280)}
                print(name, found[name], flush=True)
        os.environ["KVLAB_RUN_DIR"] = str(run)
        before, as_json = str(out / "before.json"), "--json"
        with gpu(fcntl.LOCK_EX):
            found["off"]["verify"] = kvlab("patch", "verify", "--url", live["off"][1], "--save", before)
        for name, (_, url) in live.items():
            with gpu(fcntl.LOCK_EX):
                again = kvlab("patch", "verify", "--url", url, "--against", before, as_json)
            found[name]["verify_again" if name == "off" else "verify"] = again
            found[name]["status_words"] = kvlab("patch", "status", "--url", url)
            found[name]["status"] = kvlab("patch", "status", "--url", url, as_json)
            (out / "http.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    finally:
        for process, _ in live.values():
            process.send_signal(signal.SIGTERM)
        for name, (process, _) in live.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            code = process.poll()
            found.setdefault(name, {})["end"] = {"rc": code, "left": end_group(process)}
            text = (out / f"{name}.log").read_text(errors="replace")
            found[name]["lines"] = [line for line in text.splitlines() if "kvlab" in line][:12]
        said = without_paths(json.dumps({"provenance": json.loads(provenance()), "servers": found}, indent=1))
        (out / "http.json").write_text(said + "\n", encoding="utf-8")
    print(said, flush=True)
    return 0


def loads(asked: argparse.Namespace) -> int:
    """`kvlab bench serve`, and what an operator types at each server while it runs."""
    from kvlab.bench import serve

    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    before = out / "before.json"

    def typed(server: serve.Server) -> None:
        os.environ["KVLAB_RUN_DIR"] = str(server.work / "run")
        save = ["--against", str(before), "--json"] if before.exists() else ["--save", str(before)]
        found[server.strategy] = {
            "verify": kvlab("patch", "verify", "--url", server.url, "--new-tokens", "16", *save),
            "status_words": kvlab("patch", "status", "--url", server.url),
            "status": kvlab("patch", "status", "--url", server.url, "--json"),
        }
        said = {"provenance": json.loads(provenance()), "servers": found}
        text = without_paths(json.dumps(said, indent=1))
        (out / "operator.json").write_text(text + "\n", encoding="utf-8")

    flags = (
        f"--attention-backend {asked.backend} --kv-cache-dtype fp8_e4m3 --max-total-tokens {asked.pool} "
        "--max-running-requests 64 --cuda-graph-max-bs 64 --mem-fraction-static 0.9 --grammar-backend none"
    )
    with contextlib.ExitStack() as alone:

        def say(line: str) -> None:
            print(time.strftime("%T"), line, flush=True)
            if "ready after" in line and not taken:
                # Whoever else starts on this GPU is up; nobody else works there from now on.
                taken.append(alone.enter_context(gpu(fcntl.LOCK_EX)))
                print(time.strftime("%T"), "alone on the GPU", flush=True)

        taken: list[None] = []
        run = serve.measure(
            asked.folder.resolve(),
            asked.strategies.split(","),
            serve.Asked([1, 16, 64], 512, 64, ready_seconds=300),
            server_args=flags.split(),
            port=31_000 + 100 * int(os.environ.get("JOB_SLOT", "0")),
            together=asked.together,
            apart=asked.apart,
            out=out / "serve.json",
            say=say,
            then=typed,
        )
    for server in run.servers:
        print(server.strategy, server.error, server.step_ms, server.same_tokens, server.log_lines, flush=True)
    print(json.dumps(found)[:6000], flush=True)
    return int(any(s.error for s in run.servers))


if __name__ == "__main__":
    sys.exit(main())
