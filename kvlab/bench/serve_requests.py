"""How is a load put on a server? By SGLang's own load generator, in a child process for all loads."""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvlab.bench.serve_results import Load
from kvlab.bench.serve_server import last_error
from kvlab.errors import BadInput


@dataclass(frozen=True)
class Asked:
    """The load: each concurrency in turn, `requests` requests of so many tokens in and out."""

    concurrencies: Sequence[int]
    input_tokens: int
    output_tokens: int
    requests: int | None = None
    """None: twice the concurrency, at least four."""
    verify_tokens: int = 16
    ready_seconds: float = 600.0
    load_seconds: float = 1800.0
    api_key: str | None = None
    """What the servers take; it is not kept."""

    def count(self, concurrency: int) -> int:
        return self.requests or max(2 * concurrency, 4)


@dataclass
class Loader:
    """The child process that runs SGLang's load generator."""

    process: "subprocess.Popen[str]"
    errors: Path

    def run(self, url: str, model: str | None, asked: Asked, concurrency: int, out: Path) -> Load:
        """One load. Raises BadInput where the generator fails or a request does."""
        given = arguments(url, model, asked, concurrency, out)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(given) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise BadInput(f"sglang.bench_serving: died: {last_error(self.errors)}") from None
        answer = _line(self.process, asked.load_seconds)
        if answer is None:
            raise BadInput(f"sglang.bench_serving: no answer: {last_error(self.errors)}")
        wrong = json.loads(answer)
        if wrong is not None or not out.exists():
            raise BadInput(f"sglang.bench_serving: {wrong or last_error(self.errors)}")
        found = parse(out.read_text(encoding="utf-8"), asked, concurrency)
        if found.completed != found.requests:
            raise BadInput(
                f"sglang.bench_serving: {found.completed} of {found.requests} requests completed at "
                f"concurrency {concurrency}"
            )
        return found


def _line(process: "subprocess.Popen[str]", seconds: float) -> str | None:
    """The child's next line; None where it ended or took too long."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        return process.stdout.readline() or None
    finally:
        timer.cancel()


@contextmanager
def loader(python: str, api_key: str | None = None) -> Iterator[Loader]:
    """Start it early: it imports while the first server starts. It reads the key from its environment."""
    key = {} if api_key is None else {"OPENAI_API_KEY": api_key}
    with tempfile.NamedTemporaryFile(prefix="kvlab-load-", suffix=".log") as errors:
        process = subprocess.Popen(
            [python, "-m", "kvlab.bench.serve_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.file,
            text=True,
            env={**os.environ, "SGLANG_PLUGINS": "none", **key},
        )
        try:
            yield Loader(process, Path(errors.name))
        finally:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            process.wait()


def arguments(url: str, model: str | None, asked: Asked, concurrency: int, out: Path) -> list[str]:
    """What `sglang.bench_serving` is given: random ids of exact lengths, the radix cache emptied before."""
    given = {
        "--backend": "sglang",
        "--base-url": url,
        "--dataset-name": "random-ids",
        "--random-input-len": asked.input_tokens,
        "--random-output-len": asked.output_tokens,
        "--random-range-ratio": 1.0,
        "--num-prompts": asked.count(concurrency),
        "--max-concurrency": concurrency,
        "--warmup-requests": min(concurrency, 4),
        "--seed": 1,
        "--output-file": out,
    }
    if model is not None:
        given |= {"--model": model, "--tokenizer": model}
    flags = ["--tokenize-prompt", "--flush-cache", "--disable-tqdm"]
    return [*(str(word) for pair in given.items() for word in pair), *flags]


def parse(text: str, asked: Asked, concurrency: int) -> Load:
    """The last line of what `sglang.bench_serving` wrote."""
    try:
        said = json.loads(text.strip().splitlines()[-1])
        return Load(
            concurrency=concurrency,
            requests=asked.count(concurrency),
            completed=said["completed"],
            input_tokens=asked.input_tokens,
            output_tokens=asked.output_tokens,
            seconds=said["duration"],
            output_tokens_per_s=said["output_throughput"],
            total_tokens_per_s=said["output_throughput"] + said["input_throughput"],
            **{
                f"{ours}_ms_{q}": said[f"{q}_{ours}_ms"]
                for ours in ("ttft", "tpot", "itl")
                for q in ("median", "p99")
            },
        )
    except (IndexError, KeyError, ValueError, TypeError) as e:
        raise BadInput(f"sglang.bench_serving: wrote no result that is known ({e})") from None
