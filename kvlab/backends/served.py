"""Does it really serve? Each backend's answer held to a real batch on this machine's card, and recorded.

`python -m kvlab.backends.served --out FILE` starts the installed SGLang's one-batch benchmark once a
backend, on dummy ranks, and writes what it did beside what the answer says. A refusal must be the one that
the answer quotes. `--merge FILE…` joins the records of several runs of one host into one.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from kvlab import data, outputs
from kvlab.backends.case import Verdict
from kvlab.errors import BadInput

_LOG_BYTES = 200_000
_RUNNERS = ("sglang.benchmark.one_batch", "sglang.bench_one_batch")
# A rank's lines begin with its number.
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w*(?:Error|Exception|Interrupt))(?:: (.*))?$", re.MULTILINE
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One backend on one rank: what the answer said, what happened, and whether they agree.

    `exception`: the last one in the log. `quoted`: what the answer quotes and the log says, for a refusal.
    """

    model: str
    backend: str
    sglang: str
    gpu: str
    kv_dtype: str
    flags: list[str]
    expected: bool | None
    reason: str
    served: bool
    exception: str
    quoted: str
    agrees: bool


def judge(verdict: Verdict, *, model: str, gpu: str, kv_dtype: str, code: int, log: str) -> Outcome:
    """Compare an answer with a run. A refusal agrees only where the log says what the answer quotes."""
    served = code == 0
    quoted = "" if served else next((k for k in _keys(verdict) if k in _squeeze(log)), "")
    found = _ERROR.findall(log)
    agrees = served if verdict.works else (not served and bool(quoted)) if verdict.works is False else True
    return Outcome(
        model=model,
        backend=verdict.backend,
        sglang=verdict.versions["sglang"],
        gpu=gpu,
        kv_dtype=kv_dtype,
        flags=verdict.flags,
        expected=verdict.works,
        reason=verdict.reason,
        served=served,
        exception=": ".join(filter(None, found[-1])) if found and not served else "",
        quoted=quoted,
        agrees=agrees,
    )


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _keys(verdict: Verdict) -> list[str]:
    """What a refusal's log should contain: the quoted check or the message in the reason."""
    keys = [_squeeze(e.quote) for e in verdict.evidence if e.kind in ("check", "message", "run")]
    for refusal in verdict.refusals:
        keys += [_squeeze(part) for part in re.split(r": | This card is ", refusal)]
    # An assertion's line may be cut in a traceback; a word or two would agree with anything.
    return [k[:80] for k in keys if len(k) > 20]


def run(
    models: list[str],
    *,
    layers: int,
    timeout: float,
    only: list[str] | None = None,
    parallel: int = 1,
    logs: Path | None = None,
    done: Callable[[list[Outcome]], None] = lambda _: None,
) -> list[Outcome]:
    """Serve a batch with every backend of the installed SGLang on dummy ranks, on a GPU. Raises BadInput.

    `parallel` backends at a time: no speed is measured. `logs`: a folder for what each said. `done` is called
    with all outcomes so far after each.
    """
    from kvlab import dummy, gpus
    from kvlab import models as shapes
    from kvlab.backends import decide, live, question

    runner = next((m for m in _RUNNERS if _exists(m)), None)
    card = gpus.live()
    if runner is None or card is None:
        raise BadInput("kvlab.backends.served: needs an installed SGLang and an NVIDIA card")
    release = metadata.version("sglang")
    found: list[Outcome] = []
    lock = threading.Lock()

    def one(model: str, folder: Path, verdict: Verdict, kv_dtype: str) -> None:
        code, log = _one_batch(runner, folder, _flags(verdict), timeout)
        judged = judge(verdict, model=model, gpu=card.name, kv_dtype=kv_dtype, code=code, log=log)
        if logs is not None:
            (logs / f"{model}-{judged.backend}.log").write_text(log[-_LOG_BYTES:], encoding="utf-8")
        with lock:
            print(f"{model} {judged.backend}: served {judged.served}, agrees {judged.agrees}", flush=True)
            found.append(judged)
            done(found)

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(parallel) as pool:
        started = []
        for model in models:
            config = dummy.rank_config(shapes.load(model), layers=layers)
            folder = dummy.write_rank(Path(scratch) / model, config)
            q = question(str(folder), card.key, release, flashinfer=live.here("flashinfer-python"), tp=1)
            for verdict in decide(q):
                if verdict.reason.startswith("serves ") or "." in verdict.backend:
                    continue
                if only and verdict.backend not in only:
                    continue
                started.append(pool.submit(one, model, folder, verdict, q.kv_dtype))
        for task in started:
            task.result()
    return found


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _flags(verdict: Verdict) -> list[str]:
    """What the answer says to pass; for a refusal, what a reader would have tried."""
    flags = verdict.flags or [f"--attention-backend {verdict.backend}", "--kv-cache-dtype fp8_e4m3"]
    return [word for flag in flags for word in flag.split()]


def _one_batch(runner: str, folder: Path, flags: list[str], timeout: float) -> tuple[int, str]:
    command = [sys.executable, "-m", runner, "--model-path", str(folder), "--load-format", "dummy"]
    # A batch of two needs no graphs for hundreds, and several of these share the card.
    command += [*flags, "--max-total-tokens", "65536", "--max-running-requests", "16"]
    command += ["--batch-size", "2", "--input-len", "256", "--output-len", "8", "--trust-remote-code"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as e:
        said = e.stdout if isinstance(e.stdout, str) else (e.stdout or b"").decode(errors="replace")
        return 124, said + f"\nTimeoutError: nothing after {timeout:.0f} s"
    log = done.stdout + done.stderr
    # The benchmark's workers may fail while it exits 0: a served batch has a decode line.
    if done.returncode == 0 and not re.search(r"Decode\. +median latency", log):
        return 1, log
    return done.returncode, log


@cache
def recorded() -> list[tuple[str, Outcome]]:
    """Every recorded outcome with its file: which answers a card has tried. Of two of one kind the newer."""
    documents = [
        (path, msgspec.json.decode(path.read_bytes())) for path in data.recorded().glob("*/served.json")
    ]
    documents.sort(key=lambda found: (found[1]["provenance"].get("date", ""), found[0]))
    newest = {}
    for path, document in documents:
        for o in msgspec.convert(document["outcomes"], list[Outcome]):
            kind = (o.model, o.backend, o.sglang, o.gpu, o.kv_dtype)
            newest[kind] = (f"data/recorded/{path.parent.name}/{path.name}", o)
    return sorted(newest.values(), key=lambda found: (found[0], found[1].model, found[1].backend))


def of(backend: str, *, sglang: str, gpu: str, kv_dtype: str) -> list[dict[str, Any]]:
    """Recorded runs of a backend with a release on a card: `[{source, model, served, agrees, exception}]`."""
    return [
        {
            "source": source,
            "model": o.model,
            "served": o.served,
            "agrees": o.agrees,
            "exception": o.exception,
        }
        for source, o in recorded()
        if (o.backend, o.sglang, o.kv_dtype) == (backend, sglang, kv_dtype)
        and o.gpu.endswith(gpu.split()[-1])
    ]


def merge(files: list[Path]) -> dict[str, Any]:
    """The records of several runs as one document: a newer outcome of a model and backend stands.

    Raises BadInput where they are of different releases or cards.
    """
    documents = sorted(
        (msgspec.json.decode(f.read_bytes()) for f in files), key=lambda d: d["provenance"]["date"]
    )
    outcomes = {(o["model"], o["backend"]): o for d in documents for o in d["outcomes"]}
    kinds = {(o["sglang"], o["gpu"]) for d in documents for o in d["outcomes"]}
    if len(kinds) != 1:
        raise BadInput(f"--merge: of different runs: {', '.join(' on '.join(k) for k in sorted(kinds))}")
    provenances = [d["provenance"] for d in documents]
    return {"provenance": provenances[-1], "runs": provenances, "outcomes": list(outcomes.values())}


def judge_again(found: list[Outcome], logs: Path) -> list[Outcome]:
    """Hold an earlier run's logs to the answers of today's rules. Raises BadInput where one is missing."""
    from kvlab import dummy
    from kvlab import models as shapes
    from kvlab.backends import decide, question

    judged = []
    with tempfile.TemporaryDirectory() as scratch:
        for o in found:
            folder = Path(scratch) / o.model
            if not folder.exists():
                dummy.write_rank(folder, dummy.rank_config(shapes.load(o.model), layers=4))
            q = question(str(folder), o.gpu, o.sglang, kv_dtype=o.kv_dtype, tp=1)
            log = logs / f"{o.model}-{o.backend}.log"
            if not log.is_file():
                raise BadInput(f"--logs: no {log.name} in {logs}")
            verdict = next(v for v in decide(q) if v.backend == o.backend)
            text, code = log.read_text("utf-8"), 0 if o.served else 1
            judged.append(judge(verdict, model=o.model, gpu=o.gpu, kv_dtype=o.kv_dtype, code=code, log=text))
    return judged


def _write(out: Path, document: dict[str, Any]) -> None:
    outputs.write_json("--out", out, document)


def main(argv: list[str] | None = None) -> None:
    from kvlab import provenance

    parser = argparse.ArgumentParser(prog="python -m kvlab.backends.served")
    parser.add_argument("--models", default="glm-5,deepseek-v3", help="presets whose TP8 rank is served")
    parser.add_argument("--backends", default="", help="only these, by name")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=300, help="seconds a backend")
    parser.add_argument("--parallel", type=int, default=1, help="backends at a time on the one card")
    parser.add_argument("--logs", type=Path, help="a folder for what each run said")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        help="join these records instead of running; --logs judges them again",
    )
    parser.add_argument("--out", type=Path, required=True, help="served.json of a folder in data/recorded")
    chosen = parser.parse_args(argv)
    outputs.check("--out", chosen.out)
    if chosen.merge:
        document = merge(chosen.merge)
        if chosen.logs is not None:
            found = msgspec.convert(document["outcomes"], list[Outcome])
            document["outcomes"] = judge_again(found, chosen.logs)
        _write(chosen.out, document)
        return
    only = chosen.backends.split(",") if chosen.backends else None
    if chosen.logs is not None:
        chosen.logs.mkdir(parents=True, exist_ok=True)
    origin = provenance.collect()
    outcomes = run(
        chosen.models.split(","),
        layers=chosen.layers,
        timeout=chosen.timeout,
        only=only,
        parallel=chosen.parallel,
        logs=chosen.logs,
        done=lambda found: _write(chosen.out, {"provenance": origin, "outcomes": found}),
    )
    if not all(o.agrees for o in outcomes):
        raise SystemExit(
            "an answer and a run disagree: " + ", ".join(o.backend for o in outcomes if not o.agrees)
        )


if __name__ == "__main__":
    main()
