"""kvlab merely installed, SGLang's own servers: is it in place, are tokens the same, what do faults do?

    python tests/gpu/prove_serve.py weights FOLDER [--layers 6] [--tp 8] [--nextn]
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
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve()
LENGTHS = (7, 33, 130, 515, 1500)
POOL = 65_536


@dataclass(frozen=True)
class Case:
    """`env` and `args` beside the common ones. `against`: whose tokens it must repeat."""

    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    against: str = ""
    new_tokens: int = 48
    applies: str = ""
    """The strategy of a `kvlab.patch.apply()` before the Engine."""
    mixed: bool = False
    rounds: int = 0
    """So often each prompt of the crowd is asked alone; from the second time on its prefix is cached."""
    shares: bool = False
    """Answers while others on the same GPU start and answer."""
    trigger: bool = False
    """The fault begins after the first requests."""
    altered: bool = False
    """SGLang's source is not what kvlab knows."""


OFF = {"KVLAB_PATCH": "off"}
NO_PLUGIN = {"SGLANG_PLUGINS": "kvlab_test"}
TP2 = {
    "tp_size": 2,
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}
DP2 = {**TP2, "dp_size": 2, "enable_dp_attention": True}
PP2 = {"pp_size": 2}
FA3 = {"attention_backend": "fa3"}
FA3_P64 = {**FA3, "page_size": 64}
NEXTN = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
# Each result is taken before the next batch starts.
IN_TURN = {"disable_overlap_schedule": True}
NO_ROOM = {"max_total_tokens": 32_000_000, "mem_fraction_static": 0.9}
DEEP = {"load_format": "dummy", "max_total_tokens": 495_552}


def _fault(name: str, *, strategy: str = "", trigger: bool = False, **args: Any) -> Case:
    env = {"KVLAB_TEST_FAULT": name} | ({"KVLAB_PATCH": strategy} if strategy else {})
    return Case(env, args, "off", trigger=trigger)


CASES: dict[str, Case] = {
    "off": Case(OFF, mixed=True),
    "off_again": Case(OFF, against="off", mixed=True),
    # Nothing set at all: what `pip install kvlab` and a restart do.
    "installed": Case({}, against="off", mixed=True),
    "fast": Case({"KVLAB_PATCH": "fast"}, against="off", mixed=True),
    "gather": Case({"KVLAB_PATCH": "gather"}, against="off"),
    "excluded": Case(NO_PLUGIN, against="off"),
    "applied_before": Case(NO_PLUGIN, against="off", applies="exact"),
    # With the plugin too, which is told otherwise.
    "argument": Case({"KVLAB_PATCH": "gather"}, against="off", applies="exact"),
    "silent": Case({}, {"log_level": "error"}, "off"),
    "fa3_off": Case(OFF, FA3),
    "fa3": Case({}, FA3, "fa3_off"),
    "fa3_pages_off": Case(OFF, FA3_P64),
    "fa3_pages": Case({}, FA3_P64, "fa3_pages_off"),
    "no_graphs": Case({}, {"disable_cuda_graph": True}, "no_graphs_off"),
    "no_graphs_off": Case(OFF, {"disable_cuda_graph": True}),
    # What two servers that have the GPU to themselves answer, and what others answer that share it.
    "quiet": Case(OFF, rounds=3),
    "quiet_in_turn": Case(OFF, IN_TURN, rounds=3),
    "busy_off": Case(OFF, against="quiet", rounds=4, shares=True),
    "busy_off_again": Case(OFF, against="quiet", rounds=4, shares=True),
    "busy_off_in_turn": Case(OFF, IN_TURN, "quiet_in_turn", rounds=4, shares=True),
    "busy": Case({}, against="quiet", rounds=4, shares=True),
    "busy_again": Case({}, against="quiet", rounds=4, shares=True),
    "busy_in_turn": Case({}, IN_TURN, "quiet_in_turn", rounds=4, shares=True),
    "altered": Case({}, against="off", altered=True),
    "altered_strict": Case({"KVLAB_PATCH_STRICT": "1"}, altered=True),
    "strict": Case({"KVLAB_PATCH_STRICT": "1"}, against="off"),
    # So small a pool is left to stock, which strict does not serve: the scheduler finds out.
    "strict_small_pool": Case({"KVLAB_PATCH_STRICT": "1"}, {"max_total_tokens": 2048}),
    "mistyped": Case({"KVLAB_PATCH": "exakt"}),
    "tp2_off": Case(OFF, TP2),
    "tp2": Case({}, TP2, "tp2_off"),
    "tp2_fast": Case({"KVLAB_PATCH": "fast"}, TP2),
    "dp2_off": Case(OFF, DP2),
    "dp2": Case({}, DP2, "dp2_off"),
    "pp2_off": Case(OFF, PP2),
    "pp2": Case({}, PP2, "pp2_off"),
    "nextn_off": Case(OFF, NEXTN),
    "nextn": Case({}, NEXTN, "nextn_off"),
    "nextn_fast": Case({"KVLAB_PATCH": "fast"}, NEXTN, "nextn_off"),
    "deep_off": Case(OFF | {"KVLAB_TEST_FAULT": "seeded_dummy_weights"}, DEEP, new_tokens=16),
    "deep": Case({"KVLAB_TEST_FAULT": "seeded_dummy_weights"}, DEEP, "deep_off", new_tokens=16),
    "fault_self_check": _fault("self_check_raises"),
    "fault_wrong_bit": _fault("self_check_is_wrong"),
    "fault_joint": _fault("joint_is_wrong"),
    "fault_capture": _fault("capture_raises"),
    "fault_serving": _fault("serving_raises", trigger=True),
    "fault_compile": _fault("compile_fails"),
    "fault_nvrtc": Case({"KVLAB_TEST_FAULT": "no_nvrtc", "KVLAB_PATCH": "fast"}),
    "fault_scratch": _fault("no_scratch"),
    "fault_half": _fault("half_applied"),
    "fault_removed": _fault("removed_while_serving", trigger=True),
    "fault_another": _fault("another_while_serving", trigger=True),
    "fault_eager": replace(
        _fault("serving_raises", trigger=True, disable_cuda_graph=True), against="no_graphs_off"
    ),
    "fault_again": replace(
        _fault("repeated_launch_raises", trigger=True, disable_cuda_graph=True), against="no_graphs_off"
    ),
    # So large a pool that one BF16 layer of it does not fit beside it: stock could not serve it at all.
    "no_room": Case({}, NO_ROOM, "off"),
    "no_room_off": Case(OFF, NO_ROOM),
}


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
        "one": one,
        "judge": judged,
    }
    return does[asked.command](asked)


def weights_of(asked: argparse.Namespace) -> int:
    """One rank with real safetensors, or only its shape."""
    import torch

    from kvlab import checkpoint, dummy, models

    if (asked.folder / ("config.json" if asked.dummy else checkpoint.INDEX)).exists():
        return 0
    config = dummy.rank_config(models.load(asked.model), tp=asked.tp, layers=asked.layers)
    config["num_nextn_predict_layers"] = int(asked.nextn)
    start = time.perf_counter()
    dummy.write_rank(asked.folder, config)
    if not asked.dummy:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        size = checkpoint.write_weights(asked.folder, device=device)
        print(f"{asked.folder}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s", flush=True)
    return 0


def prompt(length: int, changed: int | None = None) -> list[int]:
    ids = [100 + (length * 7 + i * 17 + i * i) % 9000 for i in range(length)]
    if changed is not None:
        ids[changed] += 1
    return ids


def one(asked: argparse.Namespace) -> int:
    """One Engine of one case; what it answered and what its schedulers said, to OUT/CASE.json."""
    case, found = CASES[asked.case], {"case": asked.case}
    path = asked.out / f"{asked.case}.json"
    started = time.perf_counter()
    import kvlab
    from kvlab import patch

    if case.applies:
        patch.apply(case.applies)
    import sglang

    from kvlab.patch.runfiles import running

    found["kvlab_is_installed"] = "site-kvlab" in str(kvlab.__file__)
    given = {
        "model_path": str(asked.folder),
        "attention_backend": "flashinfer",
        "kv_cache_dtype": "fp8_e4m3",
        "max_total_tokens": POOL,
        "max_running_requests": 32,
        "cuda_graph_max_bs_decode": 16,
        "chunked_prefill_size": 512,
        "mem_fraction_static": 0.8,
        "grammar_backend": "none",
        "log_level": "info",
        "port": 10_000 + 3600 * int(os.environ.get("JOB_SLOT", "0")) + 60 * list(CASES).index(asked.case),
    } | case.args
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
            # From the radix cache: extend reads the pool.
            found["again"] = [answer(engine, prompt(n), case.new_tokens) for n in LENGTHS]
            longer = [*prompt(515), *prompt(130)]
            found["longer"] = answer(engine, longer, case.new_tokens)
            found["changed"] = answer(engine, prompt(515, changed=17), case.new_tokens)
            found["rounds"] = [[answer(engine, ids, 32) for ids in CROWD] for _ in range(case.rounds)]
            found["at_once"] = [at_once(engine, CROWD, [32] * len(CROWD)) for _ in range(2)]
            if case.mixed:
                found["mixed"] = mixed(engine)
        # Status files are written every other second at most.
        time.sleep(2.1)
        with gpu(fcntl.LOCK_SH if case.shares else fcntl.LOCK_EX):
            found["last"] = answer(engine, prompt(33), case.new_tokens)
            time.sleep(0.2)
            found["running"] = running()
            path.write_text(json.dumps(found) + "\n", encoding="utf-8")
            # What is torn down keeps the GPU from the next one.
            engine.shutdown()
    finally:
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")
        engine.shutdown()
    found["running_after_shutdown"] = running()
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


@contextlib.contextmanager
def gpu(how: int) -> Iterator[None]:
    """Servers start together, and each answers while no other does anything on its GPUs.

    Stock repeats itself only so: its decode plan is copied from one pinned buffer, which the next plan
    overwrites, and nothing waits for the copy (prove_plan_race.py).
    """
    ids = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")
    with contextlib.ExitStack() as held:
        locks = [held.enter_context(Path(f"/tmp/kvlab-gpu-{name}.lock").open("w")) for name in sorted(ids)]
        # All or none: who waits for one GPU keeps no other from its turn.
        while len(locks) > 1 and not all(map(_takes, locks, [how] * len(locks))):
            for lock in locks:
                fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(0.05)
        if len(locks) == 1:
            fcntl.flock(locks[0], how)
        yield


def _takes(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


def mixed(engine: Any) -> list[list[int]]:
    """96 requests at once: eight prefixes of 300 shared by twelve each, other tails, prefill in chunks."""
    ids = [[*prompt(300 + n % 8), *prompt(20 + 13 * n)[1:]] for n in range(96)]
    return at_once(engine, ids, [16 + 3 * (n % 16) for n in range(96)])


def at_once(engine: Any, ids: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in new_tokens]
    return [g["output_ids"] for g in engine.generate(input_ids=ids, sampling_params=sampling)]


CROWD = [prompt(n, changed) for n in LENGTHS for changed in (None, 3, 5)]


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
    judged(argparse.Namespace(out=[out]))
    return 0


def provenance() -> str:
    import msgspec

    from kvlab.provenance import collect

    return msgspec.json.encode(collect(env=["CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_DETERMINISTIC"])).decode()


def environment(case: Case, name: str, out: Path, plugin: Path) -> dict[str, str]:
    run = Path("/tmp") / f"kvlab-run-{os.getpid()}-{name}"
    shutil.rmtree(run, ignore_errors=True)
    path = [str(plugin), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if case.altered:
        path.insert(0, str(altered_sglang(out.parent / "altered")))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVLAB_PATCH") and k != "SGLANG_PLUGINS"}
    return kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "KVLAB_RUN_DIR": str(run),
        "KVLAB_TEST_TRIGGER": str(run) + ".trigger",
        **({"KVLAB_CACHE": str(run) + ".cache"} if "nvrtc" in name else {}),
        **case.env,
    }


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


def end_group(process: subprocess.Popen[bytes]) -> int:
    """End what is left of a process group; how many processes there were but its leader."""
    until = time.perf_counter() + 4
    while (left := others(process.pid)) and process.poll() is not None and time.perf_counter() < until:
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return left


def others(group: int) -> int:
    """Live processes of a group beside its leader."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its = stat.read_text().rpartition(")")[2].split()[:3]
            found += int(its) == group and state != "Z" and stat.parent.name != str(group)
    return found


def plugin_folder(folder: Path) -> Path:
    """An installed distribution with one entry point, beside kvlab's: the faults of serve_faults.py."""
    info = folder / "kvlab_test-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE.with_name("serve_faults.py"), folder / "serve_faults.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlab-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkvlab_test = serve_faults:install\n")
    return folder


def altered_sglang(folder: Path) -> Path:
    """The installed SGLang, linked, but for one file whose casts are spelt otherwise."""
    import importlib.util

    spec = importlib.util.find_spec("sglang")
    source = Path(next(iter(spec.submodule_search_locations)))
    parts = ("srt", "layers", "attention", "flashinfer_mla_backend.py")
    target = folder / "sglang"
    if target.exists():
        return folder
    for part in parts:
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                (target / entry.name).symlink_to(entry)
        source, target = source / part, target / part
    text = source.read_text(encoding="utf-8")
    changed = text.replace(".to(\n            q.dtype\n        )", ".type(q.dtype)").replace(
        ".to(q.dtype)", ".type(q.dtype)"
    )
    if changed == text:
        raise SystemExit(f"{source.name}: no cast to alter")
    target.write_text(changed, encoding="utf-8")
    return folder


def judged(asked: argparse.Namespace) -> int:
    """What the cases show, one object: OUT/judged.json."""
    said: dict[str, dict[str, Any]] = {}
    ends: dict[str, dict[str, Any]] = {}
    logs: dict[str, str] = {}
    for out in asked.out:
        for path in sorted(out.glob("*.end.json")):
            name = path.name.removesuffix(".end.json")
            ends[name] = json.loads(path.read_text())
            logs[name] = (out / f"{name}.log").read_text(errors="replace")
            if (out / f"{name}.json").exists():
                said[name] = json.loads((out / f"{name}.json").read_text())
    verdicts = {name: verdict(name, said, ends[name], logs[name]) for name in ends}
    where = json.loads((asked.out[0] / "provenance.json").read_text())
    text = without_paths(json.dumps({"provenance": where, "cases": verdicts}, indent=1))
    (asked.out[0] / "judged.json").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return 0


def without_paths(text: str) -> str:
    """Files by their names: where a machine keeps them is nobody's business."""
    return re.sub(r"/(?:tmp|root|usr|home|opt|work|var)/(?:[^\s/'\",:;)]+/)*", "", text)


ANSWERS = ("first", "again", "longer", "changed", "last")


def verdict(name: str, said: dict[str, Any], end: dict[str, Any], log: str) -> dict[str, Any]:
    lines = [line for line in log.splitlines() if "kvlab: " in line or "kvlab.patch" in line]
    found: dict[str, Any] = {k: end[k] for k in ("rc", "seconds", "hangs", "left")} | {
        "lines": [line[-400:] for line in dict.fromkeys(lines)][:12],
        "tracebacks": log.count("Traceback (most recent call last)"),
    }
    mine = said.get(name)
    if mine is None or "last" not in mine:
        found["tail"] = log.splitlines()[-12:]
        return found
    found |= {
        "kvlab_is_installed": mine["kvlab_is_installed"],
        "seconds_to_start": mine["seconds_to_start"],
        "ranks": [rank(r) for r in mine.get("running", [])],
        "ranks_at_start": len(mine["started"]),
        "ranks_after_shutdown": len(mine.get("running_after_shutdown", [])),
        "cached_tokens": [a["cached"] for a in mine["again"]],
        "a_prompt_token_matters": answers(mine, "changed") != [mine["first"][3]["tokens"]],
        "distinct_tokens": len({t for a in answers(mine, "first") for t in a}),
        "answers": sum(len(answers(mine, a)) for a in ANSWERS),
    }
    for other in (CASES[name].against, "off"):
        if other and other in said and "last" in said[other] and other != name:
            found[f"against_{other}"] = alike(mine, said[other])
    unpatched = said.get(CASES[name].against, {})
    if "at_once" in mine:
        once, again = mine["at_once"]
        found["crowd"] = {
            "requests": len(once),
            "complete": sum(len(a) == 32 for a in once),
            "as_again": sum(map(list.__eq__, once, again)),
        }
    if mine.get("rounds"):
        found["rounds"] = repeats(mine, said)
    if "mixed" in mine:
        theirs = unpatched.get("mixed")
        found["mixed"] = {
            "requests": len(mine["mixed"]),
            "complete": sum(len(a) == 16 + 3 * (n % 16) for n, a in enumerate(mine["mixed"])),
            "same_as_off": theirs and sum(a == b for a, b in zip(mine["mixed"], theirs, strict=True)),
        }
    return found


def repeats(mine: dict[str, Any], said: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Answers from a cached prefix, each held against the quiet servers' to the bit.

    `as_quiet` those of the server that overlaps, `as_in_turn` those of the other one where they are not the
    same, `as_neither` the rest. `part_at`: how many part from the quiet server's at which logprob.
    """
    cached = mine["rounds"][1:]
    found: dict[str, Any] = {
        "answers": sum(map(len, cached)),
        "prompts": len(CROWD),
        "prompts_that_repeat": sum(
            len({json.dumps(bits_of(a)) for a in each}) == 1 for each in zip(*cached, strict=True)
        ),
    }
    if not {"quiet", "quiet_in_turn"} <= said.keys():
        return found
    quiet, in_turn = ([bits_of(a) for a in said[name]["rounds"][-1]] for name in ("quiet", "quiet_in_turn"))
    kinds: Counter[str] = Counter()
    part_at: Counter[int] = Counter()
    for each in cached:
        for a, one, other in zip(map(bits_of, each), quiet, in_turn, strict=True):
            kinds["as_quiet" if a == one else "as_in_turn" if a == other else "as_neither"] += 1
            if a != one:
                part_at[
                    next((n for n, (x, y) in enumerate(zip(a[1], one[1], strict=True)) if x != y), -1)
                ] += 1
    return found | {
        **{kind: kinds[kind] for kind in ("as_quiet", "as_in_turn", "as_neither")},
        "part_at": dict(sorted(part_at.items())),
        "prompts_where_the_quiet_ones_part": sum(a != b for a, b in zip(quiet, in_turn, strict=True)),
    }


def bits_of(a: dict[str, Any]) -> tuple[list[int], list[float]]:
    return a["tokens"], a["logprobs"]


def answers(mine: dict[str, Any], part: str) -> list[list[int]]:
    its = mine[part]
    return [a["tokens"] for a in (its if isinstance(its, list) else [its])]


def alike(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of all answers: those with the same tokens, and with the same logprobs to the bit.

    The last answer's prefix in the radix cache is another where a mixed load came before.
    """
    pairs = []
    for part in ANSWERS if ("mixed" in a) == ("mixed" in b) else ANSWERS[:-1]:
        ours, theirs = ([x[part]] if isinstance(x[part], dict) else x[part] for x in (a, b))
        pairs += zip(ours, theirs, strict=True)
    return {
        "answers": len(pairs),
        "same_tokens": sum(x["tokens"] == y["tokens"] for x, y in pairs),
        "same_logprobs": sum(x["logprobs"] == y["logprobs"] for x, y in pairs),
    }


def rank(r: dict[str, Any]) -> dict[str, Any]:
    return {
        "server": r["server"],
        "strategy": r["strategy"],
        "sites": {s["site"]: s["state"] for s in r["sites"]},
        "left": {s["site"]: s["reason"] for s in r["sites"] if s["reason"]},
        "chosen": r["chosen"],
        "counters": r["counters"],
        "scratch_bytes": r["scratch_bytes"],
        "note": r["note"],
    }


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


def wait_ready(process: subprocess.Popen[bytes], url: str, seconds: float) -> float | None:
    """Seconds until the server answers a health check; None where it does not."""
    import urllib.request

    start = time.perf_counter()
    while time.perf_counter() - start < seconds and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health_generate", timeout=20) as a:
            if a.status == 200:
                return time.perf_counter() - start
        time.sleep(0.5)
    return None


def kvlab(*words: str) -> dict[str, Any]:
    """One kvlab command as an operator types it."""
    done = subprocess.run(
        [sys.executable, "-m", "kvlab", *words], cwd="/tmp", capture_output=True, text=True, timeout=120
    )
    return {"rc": done.returncode, "out": done.stdout.strip()[-6000:], "err": done.stderr.strip()[-600:]}


if __name__ == "__main__":
    sys.exit(main())
