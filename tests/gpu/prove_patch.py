"""The patch on a real SGLang and a real GPU: identity, errors, memory, step times. A process a run, by hand.

    python tests/gpu/prove_patch.py run OUT.json --strategy stock [--backend fa3] [--page-size 64] …
    python tests/gpu/prove_patch.py errors OUT.json
    python tests/gpu/prove_patch.py compare [--across] STOCK.json PATCHED.json …
    python tests/gpu/prove_patch.py across OUT.json RUN.json …
    python tests/gpu/prove_patch.py collect FOLDER OUT_FOLDER
    python tests/gpu/prove_patch.py engine FOLDER [--tp 1]

Strategies are those of `kvlab bench step`; `stock` patches nothing. Runner, graphs, pool and batches are
SGLang's own, weights are seeded so that attention matters, and `run` shows the controls: a rerun repeats
itself, a zeroed active row changes what follows. Batches are of fixed composition: servers batch by timing,
and another batch is another rounding. So is another block of stock's expert sum, which Inductor picks by
timing (kvlab.bench.tuned): `compare` takes runs of equal picks; `--block` shows what a pick changes. What
`run` writes is a run of `kvlab bench step` too, with more in it.
"""

import argparse
import atexit
import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS = [3 + 13 * i for i in range(16)]
ALONE = (0, 7, 15)
# Requests that share this many cached tokens, and the tokens that each extends after them.
SHARED, TAILS = 512, [1 + 19 * i for i in range(16)]


def rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Which rank is served, and over which pool and backend."""
    parser.add_argument("--model", default="glm-5")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pool", type=int, default=495_552)
    parser.add_argument("--backend", default="flashinfer")
    parser.add_argument("--page-size", type=int, default=1)


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "errors"):
        one = commands.add_parser(name)
        one.add_argument("out", type=Path)
        one.add_argument("--strategy", default="fast")
        rank_arguments(one)
        one.add_argument("--burn", type=int, default=0, help="slots that somebody holds before every batch")
    run = commands.choices["run"]
    run.add_argument("--contexts", type=int, nargs="*", default=[])
    run.add_argument("--batches", type=int, nargs="*", default=[])
    run.add_argument("--capture", type=int, nargs="*", default=[1, 16])
    run.add_argument("--steps", type=int, default=32)
    run.add_argument("--new-tokens", type=int, default=256)
    run.add_argument("--no-graphs", action="store_true")
    run.add_argument("--no-identity", action="store_true")
    run.add_argument("--together", action="store_true", help="of the identity runs only the 16 prompts, once")
    run.add_argument("--block", type=int, help="the XBLOCK that wins wherever Inductor has such a candidate")
    run.add_argument("--trace", help="BATCHxCONTEXT: a trace of two decode steps", nargs="*", default=[])
    compare = commands.add_parser("compare")
    compare.add_argument("--across", action="store_true", help="also runs whose Inductor picks differ")
    compare.add_argument("stock", type=Path)
    compare.add_argument("patched", type=Path, nargs="+")
    across = commands.add_parser("across")
    across.add_argument("out", type=Path)
    across.add_argument("runs", type=Path, nargs="+")
    collect = commands.add_parser("collect")
    collect.add_argument("folder", type=Path)
    collect.add_argument("out", type=Path)
    engine = commands.add_parser("engine")
    engine.add_argument("folder", type=Path)
    engine.add_argument("--tp", type=int, default=1)
    asked = parser.parse_args()
    actions = {
        "run": run_one,
        "errors": errors,
        "compare": compare_all,
        "across": across_all,
        "collect": collect_all,
        "engine": through_engine,
    }
    return actions[asked.command](asked)


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def loaded(asked: argparse.Namespace, *, graphs: bool, batches: tuple[int, ...]) -> Any:
    """The rank that `asked` describes, served."""
    from kvlab import dummy, models
    from kvlab.bench.sglang_rank import Setup, load

    config = dummy.rank_config(models.load(asked.model), tp=asked.tp, layers=asked.layers)
    made = tempfile.mkdtemp(prefix="kvlab-rank-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = dummy.write_rank(Path(made) / "rank", config)
    setup = Setup(
        folder=str(folder),
        strategy=asked.strategy,
        pool=asked.pool,
        batches=batches,
        backend=asked.backend,
        page_size=asked.page_size,
        cuda_graphs=graphs,
    )
    say(f"loading {asked.strategy}, {asked.backend}, pool {asked.pool:,}")
    rank = load(setup)
    rank.burn = asked.burn
    return rank


def run_one(asked: argparse.Namespace) -> int:
    """As `_run`, with Inductor's picks forced if `--block` says so."""
    if asked.block is None:
        return _run(asked)
    from kvlab.bench import tuned

    with tuned.forced(asked.block):
        return _run(asked)


def _run(asked: argparse.Namespace) -> int:
    """Load, capture, show the controls, and measure under one strategy; `OUT.json` grows as it goes."""
    from kvlab.bench.step import Child
    from kvlab.bench.step_child import point

    batches = tuple(sorted({*asked.capture, *asked.batches}))
    rank = loaded(asked, graphs=not asked.no_graphs, batches=batches)
    points = [(b, c) for c in asked.contexts for b in asked.batches]
    child = Child(
        model=asked.model,
        folder="",
        strategy=asked.strategy,
        pool=rank.slots,
        backend=asked.backend,
        page_size=asked.page_size,
        cuda_graphs=not asked.no_graphs,
        points=tuple(points),
        tp=asked.tp,
        steps=asked.steps,
        out="",
    )
    found = Found(asked, rank, child)
    if not asked.no_identity:
        # Nothing here extends behind a cached prefix: the memory after it is decode's alone.
        found.identity["together"] = greedy(rank, prompts(PROMPTS), asked.new_tokens)
        say("16 prompts together")
        found.write()
    if not asked.no_identity and not asked.together:
        for number in ALONE:
            prompt = [prompts(PROMPTS)[number]]
            found.identity[f"alone, {len(prompt[0])}"] = greedy(rank, prompt, min(asked.new_tokens, 32))
        rank.snapshot("decoded")
        found.write()
        say("prompts alone")
        found.identity["shared prefix"] = shared(rank, min(asked.new_tokens, 32))
        rank.snapshot("extended")
        say("shared prefix")
        found.controls.update(controls(rank, found.identity["together"]))
        say(f"controls {found.controls}")
        found.write()
    for batch, context in points:
        found.steps.append(point(rank, child, batch, context))
        said = found.steps[-1]
        say(f"{batch} x {context:,}: {said.step_ms} ms, {said.replay_ms} replayed {said.reason}")
        found.write()
    rank.snapshot("served")
    found.write()
    for shape in asked.trace:
        from kvlab.bench.sglang_rank import profile

        batch, _, context = shape.partition("x")
        path = asked.out.with_name(f"{asked.out.stem}-{shape}.trace.json.gz")
        profile(rank, rank.start_at(int(batch), int(context)), str(path))
        say(f"trace {path.name}")
    say(f"status {found.write()['processes'][0]['patch']['counters']}")
    return 0


class Found:
    """What one run has found so far, and its file."""

    def __init__(self, asked: argparse.Namespace, rank: Any, child: Any) -> None:
        self.asked, self.rank, self.child = asked, rank, child
        self.steps: list[Any] = []
        self.identity: dict[str, Any] = {}
        self.controls: dict[str, Any] = {}
        self.errors: list[Any] = []

    def write(self) -> dict[str, Any]:
        import msgspec

        from kvlab.bench.step_child import run

        whole = json.loads(msgspec.json.encode(run(self.rank, self.child, self.steps)))
        asked = self.asked
        whole["case"] = {
            "strategy": asked.strategy,
            "model": asked.model,
            "layers": self.rank.runner.model_config.num_hidden_layers,
            "heads": self.rank.runner.model_config.num_attention_heads,
            "backend": asked.backend,
            "page_size": asked.page_size,
            "pool": self.rank.slots,
            "burn": asked.burn,
            "cuda_graphs": self.child.cuda_graphs,
        }
        whole.update(identity=self.identity, controls=self.controls, errors=self.errors)
        asked.out.write_text(json.dumps(whole) + "\n", encoding="utf-8")
        return whole


def prompts(lengths: list[int]) -> list[list[int]]:
    from kvlab.bench.sglang_rank import prompt

    return [prompt(length, row) for row, length in enumerate(lengths)]


class Digest:
    """Every step's logits to the bit, without copying them: a hash on the device, read at the end.

    A step's hash is the sum of its bit patterns times odd 64-bit weights: any one changed bit changes it.
    """

    def __init__(self) -> None:
        self._weights: Any = None
        self._steps: list[Any] = []
        self._finite: list[Any] = []
        self._tokens: list[Any] = []

    def add(self, token: Any, logits: Any) -> None:
        import torch

        bits = logits.contiguous().view(torch.int16 if logits.element_size() == 2 else torch.int32).long()
        if self._weights is None or self._weights.shape != bits.shape:
            generator = torch.Generator(device=bits.device)
            generator.manual_seed(1)
            self._weights = torch.randint(
                -(2**62), 2**62, bits.shape, generator=generator, device=bits.device, dtype=torch.int64
            )
            self._weights = self._weights * 2 + 1
        self._steps.append((bits * self._weights).sum())
        self._finite.append(torch.isfinite(logits).all())
        self._tokens.append(token.clone())

    def read(self) -> dict[str, Any]:
        import torch

        steps = torch.stack(self._steps).cpu().tolist()
        tokens = torch.stack(self._tokens).cpu().T.tolist()
        return {
            "tokens": tokens,
            "logits": [f"{s & (2**64 - 1):016x}" for s in steps],
            "finite": bool(torch.stack(self._finite).all()),
            "distinct_tokens": len({t for row in tokens for t in row}),
        }


def greedy(rank: Any, inputs: list[list[int]], new_tokens: int, prefixes: Any = None) -> dict[str, Any]:
    """Greedy tokens of one batch, `new_tokens` a request, and a hash of every step's logits."""
    if prefixes is None:
        rank.clear()
    batch = rank.start(inputs, prefixes)
    digest = Digest()
    digest.add(batch.token, batch.logits)
    for _ in range(new_tokens - 1):
        rank.decode(batch)
        digest.add(batch.token, batch.logits)
    return {"prompts": [len(i) for i in inputs], **digest.read()}


def shared(rank: Any, new_tokens: int) -> dict[str, Any]:
    """16 requests whose first tokens are the same cached slots, as after a radix-cache hit."""
    rank.clear()
    prefix = rank.prefix(SHARED, seed=7)
    return greedy(rank, prompts(TAILS), new_tokens, [prefix] * len(TAILS))


def controls(rank: Any, together: dict[str, Any]) -> dict[str, Any]:
    """Does a rerun repeat itself, and does one active row matter?"""
    count = len(together["logits"])
    again = greedy(rank, prompts(PROMPTS), count)
    ids = prompts([64])
    whole = greedy(rank, ids, 16)
    rank.clear()
    batch = rank.start(ids)
    slot = int(rank.runner.req_to_token_pool.req_to_token[batch.reqs[0].req_pool_idx, 7])
    for buffer in rank.pool.kv_buffer:
        buffer[slot] = 0
    digest = Digest()
    digest.add(batch.token, batch.logits)
    for _ in range(15):
        rank.decode(batch)
        digest.add(batch.token, batch.logits)
    without = digest.read()
    return {
        "rerun_is_identical": (again["logits"], again["tokens"]) == (together["logits"], together["tokens"]),
        "rerun_steps": count,
        "rerun_differs_from": _first(together["logits"], again["logits"]),
        "a_zeroed_row_changes_logits": without["logits"][1:] != whole["logits"][1:],
        "a_zeroed_row_changes_tokens": without["tokens"] != whole["tokens"],
    }


def errors(asked: argparse.Namespace) -> int:
    """Every layer's attention of a decode step: `--strategy`'s and stock's against float32, on equal rows."""
    import torch

    from kvlab.bench.sglang_rank import prompt
    from kvlab.bench.step import Child
    from kvlab.kernels import reference
    from kvlab.patch.reads import ADAPTERS

    rank = loaded(asked, graphs=False, batches=(1, 16))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    cls = type(rank.runner.attn_backend)
    patched = cls.forward_decode
    stock = patched.__wrapped__
    adapter = ADAPTERS["fa3" if asked.backend == "fa3" else "flashinfer_mla"]
    layers: list[dict[str, Any]] = []

    def measured(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *a: Any, **kw: Any
    ) -> Any:
        out = patched(self, q, k, v, layer, forward_batch, *a, **kw)
        theirs = stock(self, q, k, v, layer, forward_batch, *a, **kw)
        heads, latent = layer.tp_q_head_num, layer.v_head_dim
        q_rope = kw.get("q_rope")
        if q_rope is None:
            both = q.reshape(-1, heads, layer.head_dim)
            q_nope, q_rope = both[..., :latent], both[..., latent:]
        else:
            q_nope = q.view(-1, heads, latent)
            q_rope = q_rope.view(-1, heads, layer.head_dim - latent)
        active = adapter.reads(self, "decode", layer, forward_batch).tables[0]
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        want, _ = reference.mla_attention(q_nope, q_rope, rows, active, sm_scale=layer.scaling)
        want = want.reshape(out.shape)
        layers.append({"layer": layer.layer_id, "ours": _error(out, want), "stock": _error(theirs, want)})
        return out

    child = Child(
        model=asked.model,
        folder="",
        strategy=asked.strategy,
        pool=rank.slots,
        backend=asked.backend,
        page_size=asked.page_size,
        cuda_graphs=False,
        points=(),
        tp=asked.tp,
        steps=0,
        out="",
    )
    found = Found(asked, rank, child)
    page = asked.page_size
    unequal = [max(page, (64 + 541 * i) // page * page) for i in range(16)]
    shapes: dict[str, Any] = {"16 prompts": None, "16 unequal": unequal, "1 x 65,536": [65_536]}
    for name, cached in shapes.items():
        if cached is not None and sum(cached) + 64 * len(cached) * page > rank.slots - asked.burn:
            continue
        rank.clear()
        if cached is None:
            batch = rank.start(prompts(PROMPTS))
        else:
            prefixes = [rank.prefix(n, seed=i) for i, n in enumerate(cached)]
            batch = rank.start([prompt(3, i) for i in range(len(cached))], prefixes)
        for _ in range(3):
            rank.decode(batch)
        layers.clear()
        cls.forward_decode = measured
        with torch.no_grad():
            rank.decode(batch)
        cls.forward_decode = patched
        highest = int(rank.runner.req_to_token_pool.req_to_token[batch.reqs[0].req_pool_idx, :3].max())
        found.errors.append({"batch": name, "a_slot": highest, "layers": list(layers)})
        worst = max(x["ours"]["all"] / max(x["stock"]["all"], 1e-12) for x in layers)
        ours, theirs = (max(x[w]["all"] for x in layers) for w in ("ours", "stock"))
        say(f"{name}: {len(layers)} layers, ours {ours:.2e}, stock {theirs:.2e}, worst ratio {worst:.3f}")
        found.write()
    say(f"status {found.write()['processes'][0]['patch']['counters']}")
    return 0


def _error(out: Any, want: Any) -> dict[str, float]:
    """Relative errors, Frobenius: of the batch together, and of its worst request."""
    off = (out.float() - want).norm(dim=-1)
    size = want.norm(dim=-1)
    return {"all": (off.norm() / size.norm()).item(), "worst": (off / size).max().item()}


def _first(one: list[Any], other: list[Any]) -> int | None:
    """The first place where two lists of one length differ."""
    return next((i for i, (s, t) in enumerate(zip(one, other, strict=True)) if s != t), None)


def compare_all(asked: argparse.Namespace) -> int:
    """Tokens and logits of runs against stock's; exit code 1 where they differ, 2 where they can't be held
    against each other.
    """
    stock, *patched = (json.loads(p.read_text(encoding="utf-8")) for p in (asked.stock, *asked.patched))
    for path, run in zip(asked.patched, patched, strict=True):
        why = incomparable(stock, run)
        if why and not asked.across:
            print(f"{path.name}: {why}; --across compares all the same", file=sys.stderr)
            return 2
    verdicts = [verdict(stock, run) for run in patched]
    print(json.dumps(verdicts, indent=1))
    return 0 if all(v["identical"] for v in verdicts) else 1


def incomparable(stock: dict[str, Any], patched: dict[str, Any]) -> str:
    """Why another rounding of stock's own may part these runs, or nothing. Of kernels that both ran."""
    a, b = (run["processes"][0] for run in (stock, patched))
    if not all(p.get("device") and p.get("tuned") for p in (a, b)):
        return "a run does not say which GPU it was on and what Inductor picked"
    other = [k for k in a["tuned"].keys() & b["tuned"].keys() if a["tuned"][k] != b["tuned"][k]]
    if other:
        return f"Inductor picked other blocks for {', '.join(sorted(other))}"
    only = a["tuned"].keys() ^ b["tuned"].keys()
    if only and a["device"] != b["device"]:
        return f"two GPUs, and only one run has {', '.join(sorted(only))}"
    return ""


def verdict(stock: dict[str, Any], patched: dict[str, Any]) -> dict[str, Any]:
    """Where two runs differ, step by step, in the sections that the patched one ran."""
    both = {n: (stock["identity"][n], s) for n, s in patched["identity"].items() if n in stock["identity"]}
    differ = []
    for name, (a, b) in both.items():
        for row, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            if (first := _first(x, y)) is not None:
                differ.append(f"{name}: tokens of request {row} differ from step {first} on")
        if (first := _first(a["logits"], b["logits"])) is not None:
            differ.append(f"{name}: logits differ from step {first} on")
    tokens = [(x, y) for a, b in both.values() for x, y in zip(a["tokens"], b["tokens"], strict=True)]
    return {
        "case": patched["case"],
        "identical": not differ and bool(both),
        "differ": differ[:20],
        "first_tokens_equal": sum(x[1:2] == y[1:2] for x, y in tokens),
        "across": incomparable(stock, patched),
        "sections": sorted(both),
        "requests": len(tokens),
        "tokens": sum(len(x) for x, _ in tokens),
        "steps": sum(len(a["logits"]) for a, _ in both.values()),
    }


def across_all(asked: argparse.Namespace) -> int:
    """What the 16 prompts gave where machines or picks differ: each step's hash, and where pairs part."""
    runs = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in asked.runs}
    for run in runs.values():
        run["identity"] = {"together": run["identity"]["together"]}
    told = [
        {
            "name": name,
            "case": run["case"],
            **{k: run["processes"][0].get(k) for k in ("tuned", "device", "provenance")},
            "logits": run["identity"]["together"]["logits"],
        }
        for name, run in runs.items()
    ]
    pairs = [
        {"runs": [a, b], **{k: v for k, v in verdict(runs[a], runs[b]).items() if k != "case"}}
        for a, b in itertools.combinations(runs, 2)
    ]
    newest = max((t["provenance"] for t in told), key=lambda p: p["date"])
    whole = {"provenance": newest, "runs": told, "compared": pairs}
    asked.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps([{k: p[k] for k in ("runs", "identical", "differ")} for p in pairs], indent=1))
    return 0


def collect_all(asked: argparse.Namespace) -> int:
    """identity.json and memory.json of all runs under a folder: each patched run beside its case's stock."""
    runs = []
    for path in sorted(asked.folder.rglob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(found, dict) and "case" in found:
            runs.append(found)
    runs.sort(key=lambda r: r["provenance"]["date"])
    newest = {(json.dumps(r["case"], sort_keys=True), bool(r["errors"])): r for r in runs}
    runs = list(newest.values())

    def of_stock(run: dict[str, Any]) -> dict[str, Any] | None:
        case = {**run["case"], "strategy": "stock"}
        return next((r for r in runs if r["case"] == case and r["identity"]), None)

    identity, memory, off = [], [], []
    for run in runs:
        stock = of_stock(run)
        if run["errors"]:
            off.append({"case": run["case"], "provenance": run["provenance"], "batches": run["errors"]})
            continue
        if run["identity"] and stock is not None and run["case"]["strategy"] not in ("stock", "control_bf16"):
            identity.append({**verdict(stock, run), "provenance": [stock["provenance"], run["provenance"]]})
        process = run["processes"][0]
        memory.append({"case": run["case"], "provenance": run["provenance"], "stages": process["memory"]})
    stocks = [
        {
            "case": r["case"],
            "provenance": r["provenance"],
            **{k: r["processes"][0].get(k) for k in ("patch", "tuned", "device")},
            "controls": r["controls"],
            "sections": {
                name: {k: s[k] for k in ("prompts", "finite", "distinct_tokens")}
                | {"steps": len(s["logits"])}
                for name, s in r["identity"].items()
            },
        }
        for r in runs
        if r["identity"]
    ]
    asked.out.mkdir(parents=True, exist_ok=True)
    newest_provenance = max((r["provenance"] for r in runs), key=lambda p: p["date"])
    for name, content in {
        "identity.json": {"runs": stocks, "compared": identity, "errors": off},
        "memory.json": {"runs": memory},
    }.items():
        whole = {"provenance": newest_provenance, **content}
        (asked.out / name).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps([{k: v for k, v in i.items() if k != "provenance"} for i in identity], indent=1))
    return 0


def through_engine(asked: argparse.Namespace) -> int:
    """`sglang.Engine` with kvlab merely installed: what do its schedulers say of themselves?"""
    import sglang

    from kvlab.patch.runfiles import running

    engine = sglang.Engine(
        model_path=str(asked.folder),
        load_format="dummy",
        attention_backend="flashinfer",
        kv_cache_dtype="fp8_e4m3",
        tp_size=asked.tp,
        max_total_tokens=65_536,
        cuda_graph_bs_decode=[1, 4],
    )
    try:
        greedily = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        engine.generate(input_ids=prompts([30]), sampling_params=greedily)
        time.sleep(3)
        engine.generate(input_ids=prompts([9]), sampling_params=greedily)
        said = running()
    finally:
        engine.shutdown()
    print(json.dumps(said))
    return 0 if len(said) == asked.tp and all(s["strategy"] != "off" for s in said) else 1


if __name__ == "__main__":
    sys.exit(main())
