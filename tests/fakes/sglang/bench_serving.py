"""`python -m sglang.bench_serving`: the arguments that kvlab gives, the result that it reads."""

import argparse
import itertools
import json
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("backend", "base-url", "dataset-name", "output-file", "model", "tokenizer"):
        parser.add_argument(f"--{name}")
    for name in (
        "random-input-len",
        "random-output-len",
        "num-prompts",
        "max-concurrency",
        "warmup-requests",
        "seed",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--random-range-ratio", type=float)
    for name in ("tokenize-prompt", "flush-cache", "disable-tqdm"):
        parser.add_argument(f"--{name}", action="store_true")
    asked = parser.parse_args()
    assert (asked.backend, asked.dataset_name, asked.random_range_ratio) == ("sglang", "random-ids", 1.0)

    def one(number: int) -> list[float]:
        body = {
            "input_ids": [number] * asked.random_input_len,
            "sampling_params": {"max_new_tokens": asked.random_output_len},
            "stream": True,
        }
        request = urllib.request.Request(f"{asked.base_url}/generate", data=json.dumps(body).encode())
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return [time.perf_counter() - start for line in answer if line.startswith(b"data: {")]
        except OSError:
            return []

    start = time.perf_counter()
    with ThreadPoolExecutor(asked.max_concurrency) as pool:
        times = [t for t in pool.map(one, range(asked.num_prompts)) if t]
    took = time.perf_counter() - start
    found = {
        "completed": len(times),
        "duration": took,
        "output_throughput": sum(map(len, times)) / took,
        "input_throughput": len(times) * asked.random_input_len / took,
    }
    gaps = [b - a for t in times for a, b in itertools.pairwise(t)]
    for name, values in {
        "ttft": [t[0] for t in times],
        "tpot": [(t[-1] - t[0]) / (len(t) - 1) for t in times],
        "itl": gaps,
    }.items():
        found |= {f"median_{name}_ms": statistics.median(values) * 1e3, f"p99_{name}_ms": max(values) * 1e3}
    with open(asked.output_file, "a") as out:
        out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
