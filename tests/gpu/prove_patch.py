"""The patch on a real SGLang and a real GPU: identity, step times, memory, the plugin path. Run by hand.

    python tests/gpu/prove_patch.py rank FOLDER [--model glm-5] [--layers 78]
    python tests/gpu/prove_patch.py run FOLDER OUT.json --strategy exact [--backend fa3] [--page-size 64] …
    python tests/gpu/prove_patch.py compare STOCK.json PATCHED.json
    python tests/gpu/prove_patch.py engine FOLDER [--tp 1]

Strategies: off, control_bf16 and those of KVLAB_PATCH; one a process, whose runner, graphs and pool are
SGLang's own. Weights are seeded so that attention matters; `run` shows the controls too (a rerun repeats
itself, zeroing an active row changes tokens). Batches are of fixed composition: servers batch by timing, and
another batch is another rounding.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = [3 + 13 * i for i in range(16)]


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    rank = commands.add_parser("rank")
    rank.add_argument("folder", type=Path)
    rank.add_argument("--model", default="glm-5")
    rank.add_argument("--layers", type=int)
    rank.add_argument("--tp", type=int, default=8)
    run = commands.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("out", type=Path)
    run.add_argument("--strategy", required=True)
    run.add_argument("--pool", type=int, default=495_552)
    run.add_argument("--backend", default="flashinfer")
    run.add_argument("--page-size", type=int, default=1)
    run.add_argument("--contexts", type=int, nargs="+", default=[100, 8192])
    run.add_argument("--batches", type=int, nargs="+", default=[1])
    run.add_argument("--new-tokens", type=int, default=256)
    run.add_argument("--no-graphs", action="store_true")
    run.add_argument("--no-identity", action="store_true")
    compare = commands.add_parser("compare")
    compare.add_argument("stock", type=Path)
    compare.add_argument("patched", type=Path)
    engine = commands.add_parser("engine")
    engine.add_argument("folder", type=Path)
    engine.add_argument("--tp", type=int, default=1)
    asked = parser.parse_args()
    return {"rank": make_rank, "run": run_one, "compare": compare_two, "engine": through_engine}[
        asked.command
    ](asked)


def make_rank(asked: argparse.Namespace) -> int:
    """The folder that the runs serve."""
    from kvlab import dummy, models

    config = dummy.rank_config(models.load(asked.model), tp=asked.tp, layers=asked.layers)
    print(dummy.write_rank(asked.folder, config))
    return 0


def run_one(asked: argparse.Namespace) -> int:
    """Load, capture, and measure under one strategy; write `OUT.json`."""
    is_control = asked.strategy == "control_bf16"
    os.environ["KVLAB_PATCH"] = "off" if is_control else asked.strategy
    import torch
    from sglang.benchmark import one_batch
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.server_args import PortArgs, ServerArgs

    from kvlab import dummy, patch, provenance

    # one_batch loads no plugins.
    patch.apply()
    server_args = ServerArgs(
        model_path=str(asked.folder),
        load_format="dummy",
        attention_backend=asked.backend,
        kv_cache_dtype="auto" if is_control else "fp8_e4m3",
        max_total_tokens=asked.pool,
        page_size=asked.page_size,
        max_running_requests=max(asked.batches),
        **graph_batches(ServerArgs, max(asked.batches)),
        disable_cuda_graph=asked.no_graphs,
        mem_fraction_static=0.85,
    )
    _set_envs_and_config(server_args)
    for name in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
        getattr(one_batch, name)(server_args)
    with dummy.seeded_dummy_weights():
        runner, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    found: dict[str, Any] = {
        "provenance": json.loads(_encode(provenance.collect(env=["KVLAB_PATCH"]))),
        "strategy": asked.strategy,
        "backend": asked.backend,
        "page_size": asked.page_size,
        "pool": asked.pool,
        "cuda_graphs": not asked.no_graphs,
    }
    if not asked.no_identity:
        found["identity"] = identity(one_batch, runner, asked.new_tokens)
        found["controls"] = controls(one_batch, runner)
    found["runs"] = [
        timed(one_batch, runner, batch, context) for batch in asked.batches for context in asked.contexts
    ]
    found["peak_bytes"] = torch.cuda.max_memory_allocated()
    found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    found["patch"] = patch.status()
    asked.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(json.dumps({k: found[k] for k in ("strategy", "runs", "peak_bytes")}))
    return 0


def graph_batches(server_args: Any, most: int) -> dict[str, int]:
    """The argument that bounds captured batches, by the name that this release has."""
    import dataclasses

    names = {f.name for f in dataclasses.fields(server_args)}
    return {n: most for n in ("cuda_graph_max_bs_decode", "cuda_graph_max_bs") if n in names}


def _encode(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


def prompt(length: int, row: int = 0) -> list[int]:
    return [100 + (row * 7 + i * 17 + i * i) % 9000 for i in range(length)]


def identity(one_batch: Any, runner: Any, new_tokens: int) -> list[dict[str, Any]]:
    """Greedy tokens of each prompt alone, and a digest of every step's logits."""
    answers = []
    for number, length in enumerate(PROMPTS):
        tokens, digest = greedy(one_batch, runner, [prompt(length, number)], new_tokens)
        answers.append({"prompt": length, "tokens": tokens, "logits": digest})
    return answers


def greedy(one_batch: Any, runner: Any, inputs: list[list[int]], new_tokens: int) -> tuple[list[int], str]:
    runner.clear()
    reqs = one_batch.prepare_synthetic_inputs_for_latency_test(len(inputs), len(inputs[0]), inputs)
    token, logits, batch = runner.extend(reqs)
    digest, tokens = hashlib.sha256(_bytes(logits)), [int(token[0])]
    for _ in range(new_tokens - 1):
        token, logits = runner.decode(token, batch)
        digest.update(_bytes(logits))
        tokens.append(int(token[0]))
    return tokens, digest.hexdigest()


def _bytes(logits: Any) -> bytes:
    import torch

    return logits.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def controls(one_batch: Any, runner: Any) -> dict[str, bool]:
    """Does a rerun repeat itself, and does one active row matter?"""
    ids = [prompt(64)]
    first = greedy(one_batch, runner, ids, 16)
    again = greedy(one_batch, runner, ids, 16)
    inner = runner.torch_runner
    runner.clear()
    reqs = one_batch.prepare_synthetic_inputs_for_latency_test(1, 64, ids)
    token, _, batch = runner.extend(reqs)
    slot = int(inner.req_to_token_pool.req_to_token[reqs[0].req_pool_idx, 7])
    for buffer in inner.token_to_kv_pool.kv_buffer:
        buffer[slot] = 0
    digest = hashlib.sha256()
    for _ in range(15):
        token, logits = runner.decode(token, batch)
        digest.update(_bytes(logits))
    # The same steps without the zeroed row, from the same start.
    runner.clear()
    token, _, batch = runner.extend(one_batch.prepare_synthetic_inputs_for_latency_test(1, 64, ids))
    whole = hashlib.sha256()
    for _ in range(15):
        token, logits = runner.decode(token, batch)
        whole.update(_bytes(logits))
    return {"rerun_is_identical": first == again, "an_active_row_matters": digest.digest() != whole.digest()}


def timed(one_batch: Any, runner: Any, batch_size: int, context: int, steps: int = 32) -> dict[str, Any]:
    """Median decode step of a batch, after a few to warm up; None where it does not fit."""
    import torch

    run = {"batch": batch_size, "context": context, "step_ms": None}
    if batch_size * (context + steps + 8) > runner.torch_runner.max_total_num_tokens:
        return run
    try:
        runner.clear()
        inputs = [prompt(context, row) for row in range(batch_size)]
        reqs = one_batch.prepare_synthetic_inputs_for_latency_test(batch_size, context, inputs)
        token, _, batch = runner.extend(reqs)
        times = []
        for _ in range(steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            token, _ = runner.decode(token, batch)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return run
    return {**run, "step_ms": statistics.median(times[8:])}


def compare_two(asked: argparse.Namespace) -> int:
    """Tokens and logits of two runs; exit code 1 where they differ."""
    stock, patched = (json.loads(p.read_text(encoding="utf-8")) for p in (asked.stock, asked.patched))
    differ = []
    for a, b in zip(stock["identity"], patched["identity"], strict=True):
        if a["tokens"] != b["tokens"]:
            first = next(i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y)
            differ.append(f"prompt of {a['prompt']}: tokens differ from {first} on")
        elif a["logits"] != b["logits"]:
            differ.append(f"prompt of {a['prompt']}: same tokens, other logits")
    rows = [
        (a["batch"], a["context"], a["step_ms"], b["step_ms"])
        for a, b in zip(stock["runs"], patched["runs"], strict=True)
    ]
    print(
        json.dumps(
            {
                "identical": not differ,
                "differ": differ,
                "controls": [stock.get("controls"), patched.get("controls")],
                "step_ms": rows,
                "peak_bytes": [stock["peak_bytes"], patched["peak_bytes"]],
            }
        )
    )
    return 1 if differ else 0


def through_engine(asked: argparse.Namespace) -> int:
    """`sglang.Engine` with kvlab merely installed: what do its schedulers say of themselves?"""
    import sglang
    from sglang.srt.server_args import ServerArgs

    from kvlab.patch.runfiles import running

    engine = sglang.Engine(
        model_path=str(asked.folder),
        load_format="dummy",
        attention_backend="flashinfer",
        kv_cache_dtype="fp8_e4m3",
        tp_size=asked.tp,
        max_total_tokens=65_536,
        **graph_batches(ServerArgs, 4),
    )
    try:
        greedily = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        engine.generate(input_ids=[prompt(30)], sampling_params=greedily)
        time.sleep(3)
        engine.generate(input_ids=[prompt(9)], sampling_params=greedily)
        said = running()
    finally:
        engine.shutdown()
    print(json.dumps(said))
    return 0 if len(said) == asked.tp and all(s["strategy"] != "off" for s in said) else 1


if __name__ == "__main__":
    sys.exit(main())
