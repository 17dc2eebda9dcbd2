"""Does a decode step under CUDA graphs attend by its own plan? SGLang's fast plan waits for no copy.

    python tests/gpu/prove_plan_race.py OUT.json [--steps 64]

One layer of flashinfer's MLA decode in a CUDA graph, planned for each step by SGLang's
`fast_mla_decode_plan`, as a server does. The plan is written to one pinned buffer and copied from there. A
host that runs ahead of a busy GPU writes the next plan before this one was copied: `ahead`. `synchronised`
waits for the GPU each step, `guarded` waits only for the last plan's copy, and `patched` takes the plan that
`kvlab.patch.apply()` puts in its place.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HEADS, RANK, ROPE, SLOTS = 8, 512, 64, 4096
FIRST = 100


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=64)
    asked = parser.parse_args()
    import msgspec
    import torch

    from kvlab.provenance import collect

    world = World(asked.steps)
    hows = ("synchronised", "synchronised", "ahead", "guarded", "patched")
    runs = {how: world.run(how, asked.steps) for how in hows}
    right = runs["synchronised"]
    # What a step gives by the next step's plan: one slot too many, the stale one behind its length.
    late = world.run("synchronised", asked.steps, plan_ahead=1)
    differs = [n for n in range(asked.steps) if not torch.equal(runs["ahead"][n], right[n])]
    found = {
        "provenance": json.loads(msgspec.json.encode(collect())),
        "steps": asked.steps,
        "ahead_differs": len(differs),
        "ahead_is_the_next_plans": sum(torch.equal(runs["ahead"][n], late[n]) for n in differs),
        "guarded_differs": sum(not torch.equal(runs["guarded"][n], right[n]) for n in range(asked.steps)),
        "patched_differs": sum(not torch.equal(runs["patched"][n], right[n]) for n in range(asked.steps)),
        "the_next_plan_matters": sum(not torch.equal(late[n], right[n]) for n in range(asked.steps)),
        "largest_error": max(
            (float((runs["ahead"][n] - right[n]).abs().max()) for n in differs), default=0.0
        ),
        "largest_value": float(right.abs().max()),
    }
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0


class World:
    """A captured layer: queries, rows, and indices whose tail behind each length is stale."""

    def __init__(self, steps: int) -> None:
        import torch
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
        from sglang.srt.layers.attention import flashinfer_mla_backend

        from kvlab import patch

        self.torch, self.plan = torch, flashinfer_mla_backend.fast_mla_decode_plan
        patch.apply("exact")
        self.patched_plan = flashinfer_mla_backend.fast_mla_decode_plan
        assert self.patched_plan is not self.plan
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

        self.q_nope, self.q_pe = normal(1, HEADS, RANK), normal(1, HEADS, ROPE)
        rows = normal(SLOTS, 1, RANK + ROPE)
        self.ckv, self.kpe = rows[..., :RANK], rows[..., RANK:]
        self.indices = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)).to(
            "cuda", torch.int32
        )
        self.indptr = torch.tensor([0, FIRST], dtype=torch.int32, device="cuda")
        self.wrapper = BatchMLAPagedAttentionWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"),
            use_cuda_graph=True,
            qo_indptr=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            kv_indptr=self.indptr.clone(),
            kv_indices=self.indices,
            kv_len_arr=torch.tensor([FIRST], dtype=torch.int32, device="cuda"),
            backend="auto",
        )
        of = {"device": "cuda", "dtype": torch.int32}
        self.wrapper.plan(
            torch.tensor([0, 1], **of),
            self.indptr,
            self.indices[:FIRST],
            torch.tensor([FIRST], **of),
            HEADS,
            RANK,
            ROPE,
            1,
            False,
            (RANK + ROPE) ** -0.5,
            torch.bfloat16,
            torch.bfloat16,
        )
        # Planning copied the indices that it was given; the rest is what was there: stale.
        self.out = torch.empty_like(self.q_nope)
        self.outs = torch.empty((steps, *self.out.shape), dtype=torch.bfloat16, device="cuda")
        self._attend()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._attend()

    def _attend(self) -> None:
        self.wrapper.run(self.q_nope, self.q_pe, self.ckv, self.kpe, out=self.out)

    def run(self, how: str, steps: int, plan_ahead: int = 0) -> Any:
        """The outputs of `steps` growing by a token, on the host in float32."""
        torch = self.torch
        copied, done = torch.cuda.Event(), []
        for step in range(steps):
            length = FIRST + step + plan_ahead
            if how != "synchronised":
                # As a scheduler that overlaps: the host plans this step while the GPU is still busy before
                # the last one, with a prefill or another server, but never two steps ahead.
                if step > 1:
                    done[step - 2].synchronize()
                torch.cuda._sleep(4_000_000)
            if how == "guarded":
                copied.synchronize()
            plan = self.patched_plan if how == "patched" else self.plan
            plan(
                self.wrapper,
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([0, length], dtype=torch.int32),
                self.indices,
                torch.tensor([length], dtype=torch.int32),
                HEADS,
                RANK,
                ROPE,
                1,
                False,
                (RANK + ROPE) ** -0.5,
                torch.bfloat16,
                torch.bfloat16,
            )
            copied.record()
            self.graph.replay()
            self.outs[step].copy_(self.out)
            done.append(torch.cuda.Event())
            done[-1].record()
            if how == "synchronised":
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return self.outs.float().cpu()


if __name__ == "__main__":
    sys.exit(main())
