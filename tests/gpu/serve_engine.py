"""What does one `sglang.Engine` of a case answer, and what do its schedulers say of the patch?"""

import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from serve_cases import CASES, CROWD, FILL, LENGTHS, POOL, Case, prompt
from serve_processes import gpu


def one(folder: Path, out: Path, name: str) -> None:
    """One Engine of the case `name`; what it answered and what its schedulers said, to OUT/NAME.json."""
    case, found = CASES[name], {"case": name}
    path = out / f"{name}.json"
    started = time.perf_counter()
    import kvlab
    from kvlab import patch

    if case.applies:
        patch.apply(case.applies)
    import sglang

    from kvlab.patch.runfiles import running

    found["kvlab_is_installed"] = "site-kvlab" in str(kvlab.__file__)
    if case.model:
        folder = folder.with_name(f"{folder.name}-{case.model}")
    given = {
        "model_path": str(folder),
        "attention_backend": "flashinfer",
        "kv_cache_dtype": "fp8_e4m3",
        "max_total_tokens": POOL,
        "max_running_requests": 32,
        "cuda_graph_max_bs_decode": 16,
        "chunked_prefill_size": 512,
        "mem_fraction_static": 0.8,
        "grammar_backend": "none",
        "log_level": "info",
        "port": 10_000 + 3600 * int(os.environ.get("JOB_SLOT", "0")) + 36 * list(CASES).index(name),
    } | case.args
    if given.get("pdmux_config_path"):
        given["pdmux_config_path"] = pdmux_config(out / f"{name}.yaml")
    with gpu(fcntl.LOCK_SH):
        engine = sglang.Engine(**given)
    found["seconds_to_start"] = time.perf_counter() - started
    trigger = Path(os.environ["KVLAB_TEST_TRIGGER"])
    found["started"] = running()
    try:
        with gpu(fcntl.LOCK_SH if case.shares else fcntl.LOCK_EX):
            found["first"] = [answer(engine, prompt(n), case.new_tokens) for n in LENGTHS]
            if case.trigger:
                trigger.touch()
                time.sleep(1)
            if case.then:
                found["then"] = between(case, engine, folder)
            # From the radix cache: extend reads the pool.
            found["again"] = [answer(engine, prompt(n), case.new_tokens) for n in LENGTHS]
            longer = [*prompt(515), *prompt(130)]
            found["longer"] = answer(engine, longer, case.new_tokens)
            found["changed"] = answer(engine, prompt(515, changed=17), case.new_tokens)
            found["rounds"] = [[answer(engine, ids, 32) for ids in CROWD] for _ in range(case.rounds)]
            found["at_once"] = [at_once(engine, case, CROWD, [32] * len(CROWD)) for _ in range(2)]
            if case.mixed:
                found["mixed"] = mixed(engine, case)
        # Status files are written every other second at most.
        time.sleep(2.1)
        with gpu(fcntl.LOCK_SH if case.shares else fcntl.LOCK_EX):
            found["last"] = answer(engine, prompt(33), case.new_tokens)
            time.sleep(0.2)
            found["running"] = running()
            found["witness"] = witnessed()
            path.write_text(json.dumps(found) + "\n", encoding="utf-8")
            # What is torn down keeps the GPU from the next one.
            engine.shutdown()
    finally:
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")
        engine.shutdown()
    found["running_after_shutdown"] = running()
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def answer(engine: Any, ids: list[int], new_tokens: int) -> dict[str, Any]:
    """Greedy tokens of one prompt and their logprobs, which are compared bit by bit."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    start = time.perf_counter()
    got = engine.generate(input_ids=[ids], sampling_params=sampling, return_logprob=True)[0]
    return {
        "tokens": got["output_ids"],
        "logprobs": [p[0] for p in got["meta_info"]["output_token_logprobs"]],
        "cached": got["meta_info"].get("cached_tokens"),
        "seconds": time.perf_counter() - start,
    }


def mixed(engine: Any, case: Case) -> list[list[int]]:
    """96 requests at once: eight prefixes of 300 shared by twelve each, other tails, prefill in chunks."""
    ids = [[*prompt(300 + n % 8), *prompt(20 + 13 * n)[1:]] for n in range(96)]
    return at_once(engine, case, ids, [16 + 3 * (n % 16) for n in range(96)])


def at_once(engine: Any, case: Case, ids: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in new_tokens]
    if case.holds:
        hold = Path(os.environ["KVLAB_TEST_WITNESS"] + ".hold")
        hold.touch()
        threading.Timer(1, hold.unlink).start()
    return [g["output_ids"] for g in engine.generate(input_ids=ids, sampling_params=sampling)]


def between(case: Case, engine: Any, folder: Path) -> Any:
    """What the case does between its first answers and the same questions again; what SGLang says of it."""
    if case.then == "evict":
        return [answer(engine, ids, 1)["cached"] for ids in FILL]
    if case.then == "release":
        time.sleep(0.2)  # SGLang gives nothing back while it is not idle
        engine.release_memory_occupation()
        time.sleep(0.2)
        engine.resume_memory_occupation()
    return engine.update_weights_from_disk(str(folder))


def pdmux_config(path: Path) -> str:
    """Two ways to divide the SMs; a prefill of over 512 tokens runs a layer at a time."""
    path.write_text(
        "sm_group_num: 4\nsplit_forward_token_budget: 1024\ndecode_bs_divisor: 8\n", encoding="utf-8"
    )
    return str(path)


def witnessed() -> list[dict[str, Any]]:
    """What serve_witness.py counted, of each process that counted anything."""
    path = Path(os.environ["KVLAB_TEST_WITNESS"])
    found = sorted(path.parent.glob(f"{path.name}.[0-9]*"))
    return [json.loads(p.read_text(encoding="utf-8")) for p in found if p.suffix != ".part"]
