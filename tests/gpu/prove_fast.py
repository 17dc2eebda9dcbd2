"""Does the fused decode repeat itself where SGLang serves it, and is it as near to float64 as it should be?

    python tests/gpu/prove_fast.py OUT.json [--steps 256] [--runs 3] [--strategy fast]

One rank of `prove_patch.py`, its 16 prompts in one batch, several times with CUDA graphs and once without;
13 of them twice, whose batch a graph of 16 pads; and one alone. At each step every layer's query, new row and
attention output are copied, inside the captured graph, and kept; so are the prompts' rows. Told is the first
step and layer at which two runs differ, whether what the kernel read differed there already, and which
requests. Every layer's output of some steps is held against float64 attention over the rows that it read.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prove_patch import PROMPTS, Digest, loaded, prompts, rank_arguments, say

WHAT = ("query", "row", "out")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--strategy", default="fast")
    rank_arguments(parser)
    parser.add_argument("--burn", type=int, default=0)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--eager-steps", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()

    tap = Tap()
    with tap.listening():
        rank = loaded(asked, graphs=True, batches=(1, len(PROMPTS)))
    result: dict[str, Any] = {"case": case(asked, rank), "prompts": PROMPTS, "runs": [], "differ": []}
    groups: list[list[Run]] = []

    def decode(name: str, lengths: list[int], steps: int) -> Run:
        run = Run.of(name, rank, tap, lengths, steps)
        result["runs"].append(run.told())
        say(str(result["runs"][-1]))
        return run

    plan = [
        ("together", PROMPTS, asked.steps, asked.runs, asked.eager_steps),
        ("padded", PROMPTS[:13], asked.eager_steps, 2, 0),
        ("alone", PROMPTS[-1:], 2 * asked.eager_steps, 2, asked.eager_steps),
    ]
    for name, lengths, steps, times, of_eager in plan:
        group = [decode(f"{name}, graphs, {n + 1}", lengths, steps) for n in range(times)]
        if of_eager:
            with tap.listening(), eager(rank):
                group.append(decode(f"{name}, eager", lengths, of_eager))
        groups.append(group)
    for first, *others in groups:
        found = [differ(first, other) for other in others]
        result["differ"] += found
        for one in found:
            say(str(one))
        write(asked.out, result, rank, asked)
    result["errors"] = []
    for first, *_ in groups:
        steps = {d["first"]["step"] for d in result["differ"] if "first" in d and d["runs"][0] == first.name}
        for one in errors(first, rank, steps):
            say(str({k: v for k, v in one.items() if k != "layers"}))
            result["errors"].append({"run": first.name, **one})
    write(asked.out, result, rank, asked)
    return 0


def case(asked: argparse.Namespace, rank: Any) -> dict[str, Any]:
    config = rank.runner.model_config
    known = {k: getattr(asked, k) for k in ("strategy", "model", "backend", "page_size", "steps")}
    return {**known, "layers": config.num_hidden_layers, "heads": config.num_attention_heads}


def write(out: Path, result: dict[str, Any], rank: Any, asked: argparse.Namespace) -> None:
    import msgspec

    from kvlab.bench.step_child import process

    whole = {**result, "process": json.loads(msgspec.json.encode(process(rank, asked.strategy)))}
    whole["provenance"] = whole["process"]["provenance"]
    out.write_text(json.dumps(whole) + "\n", encoding="utf-8")


class Tap:
    """Copies of what the decode kernel was given and gave, by layer: static tensors that a graph refills."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], dict[str, Any]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        from kvlab.patch.strategies.fused import Fused

        attend = Fused._attend

        def tapped(strategy: Any, call: Any, rows: Any) -> Any:
            out = attend(strategy, call, rows)
            self._keep(call, rows, out)
            return out

        Fused._attend = tapped
        try:
            yield
        finally:
            Fused._attend = attend

    def _keep(self, call: Any, rows: Any, out: Any) -> None:
        import torch

        heads, rank = call.layer.tp_q_head_num, call.layer.v_head_dim
        if call.q_rope is None:
            query = call.q.reshape(-1, heads, call.layer.head_dim)
        else:
            parts = call.q.view(-1, heads, rank), call.q_rope.view(-1, heads, call.layer.head_dim - rank)
            query = torch.cat(parts, -1)
        given = {
            "query": query,
            "row": rows.view(torch.uint8).reshape(rows.shape[0], -1)[call.forward_batch.out_cache_loc],
            "out": out.view(-1, heads, rank),
        }
        key = call.layer.layer_id, out.shape[0]
        if key not in self.held:
            # Outside of any graph's memory: the warm-up call before a capture comes by here.
            with torch.inference_mode(False):
                self.held[key] = {
                    k: torch.empty(v.shape, dtype=v.dtype, device=v.device) for k, v in given.items()
                }
        for name, value in given.items():
            self.held[key][name].copy_(value)

    def now(self, batch: int) -> dict[str, Any]:
        """{query, row, out}: [layers, batch, …] of the step that has just run, perhaps in a larger graph."""
        import torch

        ran = min(size for _, size in self.held if size >= batch)
        layers = sorted(layer for layer, size in self.held if size == ran)
        return {w: torch.stack([self.held[layer, ran][w][:batch] for layer in layers]) for w in WHAT}


class Run:
    """One batch decoded from the same prompts: what each layer saw at each step, kept on the device."""

    def __init__(self, name: str, lengths: list[int]) -> None:
        self.name, self.lengths = name, lengths
        self.steps: list[dict[str, Any]] = []
        self.prompt_rows: Any = None
        self.slots: Any = None
        self.digest: dict[str, Any] = {}

    @classmethod
    def of(cls, name: str, rank: Any, tap: Tap, lengths: list[int], steps: int) -> "Run":
        import torch

        made = cls(name, lengths)
        rank.clear()
        batch = rank.start(prompts(lengths))
        torch.cuda.synchronize()
        table = rank.runner.req_to_token_pool.req_to_token
        ids = [r.req_pool_idx for r in batch.reqs]
        first = torch.cat([table[i, :n].long() for i, n in zip(ids, lengths, strict=True)])
        made.prompt_rows = torch.stack([rows[first] for rows in rows_of(rank)])
        digest = Digest()
        digest.add(batch.token, batch.logits)
        for _ in range(steps - 1):
            rank.decode(batch)
            made.steps.append(tap.now(len(lengths)))
            digest.add(batch.token, batch.logits)
        torch.cuda.synchronize()
        made.digest = digest.read()
        made.slots = [table[i, : n + steps - 1].long().clone() for i, n in zip(ids, lengths, strict=True)]
        return made

    def told(self) -> dict[str, Any]:
        return {"run": self.name, "steps": len(self.steps) + 1, "finite": self.digest["finite"]}


def rows_of(rank: Any) -> list[Any]:
    """Each layer's rows, uint8 [slots, width]."""
    import torch

    return [b.view(torch.uint8).reshape(b.shape[0], -1) for b in rank.pool.kv_buffer]


@contextmanager
def eager(rank: Any) -> Iterator[None]:
    """Decode without the captured graphs."""
    runner = rank.runner.decode_cuda_graph_runner
    runner.can_run_graph = lambda forward_batch: False
    try:
        yield
    finally:
        del runner.can_run_graph


def differ(one: Run, other: Run) -> dict[str, Any]:
    """Where `other` first parts from `one`, and at which layers and requests of that step."""
    import torch

    found: dict[str, Any] = {"runs": [one.name, other.name], "steps": min(len(one.steps), len(other.steps))}
    rows = (one.prompt_rows != other.prompt_rows).any(-1)
    found["prompt_rows_differ"] = int(rows.sum())
    found["same_slots"] = all(
        torch.equal(a[: min(len(a), len(b))], b[: min(len(a), len(b))])
        for a, b in zip(one.slots, other.slots, strict=True)
    )
    for step, (a, b) in enumerate(zip(one.steps, other.steps, strict=False), 1):
        parts = {w: (a[w] != b[w]).flatten(2).any(-1) for w in WHAT}  # [layers, requests]
        if not any(bool(p.any()) for p in parts.values()):
            continue
        every = torch.stack([parts[w] for w in WHAT]).any(0)
        layer = int(every.any(1).nonzero()[0])
        found["first"] = {
            "step": step,
            "layer": layer,
            **{w: parts[w][layer].nonzero().flatten().tolist() for w in WHAT},
            "requests_of_the_step": every.any(0).nonzero().flatten().tolist(),
            "largest": {
                w: float((a[w][layer].double() - b[w][layer].double()).abs().max()) for w in ("query", "out")
            },
        }
        # A kernel that was given the same and gave something else, at any layer of this step.
        itself = parts["out"] & ~parts["query"] & ~parts["row"]
        found["first"]["out_alone"] = [[int(x) for x in pair] for pair in itself.nonzero()[:50]]
        break
    tokens = zip(one.digest["tokens"], other.digest["tokens"], strict=True)
    found["tokens_from"] = [
        next((i for i, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), None) for x, y in tokens
    ]
    found["identical"] = "first" not in found and not found["prompt_rows_differ"]
    return found


def errors(run: Run, rank: Any, also: set[int]) -> Iterator[dict[str, Any]]:
    """Relative errors (Frobenius) of every layer's output against float64 over the rows that it read.

    The rows are put back into the pool as this run wrote them: those of the prompts, then a row a step.
    """
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    from kvlab.kernels import reference
    from kvlab.kernels.active import ActiveSlots

    attentions = [m for m in rank.runner.model.modules() if isinstance(m, RadixAttention)]
    scale = {m.layer_id: m.scaling for m in attentions if m.head_dim > m.v_head_dim == rank.pool.kv_lora_rank}
    steps = {1, 2, 8, 23, len(run.steps)} | also
    pool = rows_of(rank)
    first = torch.cat([s[:n] for s, n in zip(run.slots, run.lengths, strict=True)])
    for step in sorted(s for s in steps if s <= len(run.steps)):
        lengths = [n + step for n in run.lengths]
        indices = torch.cat([s[:n] for s, n in zip(run.slots, lengths, strict=True)]).int()
        bounds = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
        active = ActiveSlots.ragged(indices, bounds.to(indices.device))
        new = torch.stack([s[n : n + step] for s, n in zip(run.slots, run.lengths, strict=True)], 1).flatten()
        found = []
        for layer, rows in enumerate(pool):
            with torch.inference_mode():
                rows[first] = run.prompt_rows[layer]
                rows[new] = torch.cat([s["row"][layer] for s in run.steps[:step]])
            query, out = (run.steps[step - 1][w][layer] for w in ("query", "out"))
            rank_of = out.shape[-1]
            want, _ = reference.mla_attention(
                query[..., :rank_of],
                query[..., rank_of:],
                rows.view(rank.pool.dtype),
                active,
                sm_scale=scale[layer],
                dtype=torch.float64,
            )
            off, size = (out.double() - want).flatten(1), want.flatten(1)
            each = (off.norm(dim=1) / size.norm(dim=1)).max()
            found.append({"layer": layer, "all": float(off.norm() / size.norm()), "worst": float(each)})
        worst = max(found, key=lambda f: f["all"])
        yield {
            "step": step,
            "worst": worst["all"],
            "worst_layer": worst["layer"],
            "worst_request": max(f["worst"] for f in found),
            "layers": found,
        }


if __name__ == "__main__":
    sys.exit(main())
