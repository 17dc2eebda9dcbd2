"""What does a decode step cost, stock and patched, end to end? A process of SGLang per strategy and pool."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from kvlab import dummy, models
from kvlab.bench.step_results import STRATEGIES, StepRun, merge, read, write
from kvlab.errors import BadInput

# Steps decoded at each point: warm-up, timed, and those whose graph alone is timed.
WARM_UP, STEPS, GRAPH_STEPS = 8, 32, 12


@dataclass(frozen=True)
class Plan:
    """What to measure. `folder`: a rank's folder, made from `model` where there is none."""

    model: str = "glm-5"
    layers: int | None = None
    tp: int = 8
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    batches: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (100, 8192, 65536)
    pools: tuple[int, ...] = (495_552,)
    backend: str = "flashinfer"
    page_size: int = 1
    cuda_graphs: bool = True
    steps: int = STEPS
    timeout: float = 900.0
    trace: str | None = None

    def check(self) -> None:
        """Raises BadInput for what cannot be served."""
        unknown = [s for s in self.strategies if s not in STRATEGIES]
        if unknown or not self.strategies:
            raise BadInput(
                f"--strategies: {', '.join(unknown) or 'none'}; use some of {', '.join(STRATEGIES)}"
            )
        if self.backend not in ("flashinfer", "fa3"):
            raise BadInput(f"--backend {self.backend}: flashinfer or fa3")
        if self.backend == "flashinfer" and self.page_size != 1:
            raise BadInput(f"--page-size {self.page_size}: flashinfer's MLA backend has pages of one token")
        if self.page_size < 1 or any(p % self.page_size for p in self.pools):
            raise BadInput(f"--page-size {self.page_size}: it must divide every pool")
        for name, values in (("batches", self.batches), ("contexts", self.contexts), ("pools", self.pools)):
            if not values or min(values) < 1:
                raise BadInput(f"--{name}: expected whole numbers from 1 on")


@dataclass(frozen=True)
class Child:
    """One process: a strategy, a pool, and its points (batch, context)."""

    model: str
    folder: str
    strategy: str
    pool: int
    backend: str
    page_size: int
    cuda_graphs: bool
    points: tuple[tuple[int, int], ...]
    tp: int
    steps: int
    out: str
    trace: str | None = None


def control_pool(plan: Plan, pool: int) -> int:
    """Slots of the control's BF16 cache: the fewest that hold every point which the FP8 pool holds.

    Its step does not depend on the pool, and a BF16 row takes twice the memory.
    """
    tokens = WARM_UP + plan.steps + GRAPH_STEPS + 2 + plan.page_size
    needs = [b * (c + tokens) for b in plan.batches for c in plan.contexts]
    fit = [n for n in needs if n <= pool]
    unit = max(1024, plan.page_size)
    return -(-max(fit, default=pool) // unit) * unit


def children(plan: Plan, folder: Path, scratch: Path) -> list[Child]:
    """The processes of a plan, in its strategies' order."""
    points = tuple((b, c) for c in plan.contexts for b in plan.batches)
    made = []
    for pool in plan.pools:
        for strategy in plan.strategies:
            slots = control_pool(plan, pool) if strategy == "control_bf16" else pool
            if any((c.strategy, c.pool) == (strategy, slots) for c in made):
                continue
            trace = plan.trace and plan.trace.replace("STRATEGY", strategy)
            made.append(
                Child(
                    model=plan.model,
                    folder=str(folder),
                    strategy=strategy,
                    pool=slots,
                    backend=plan.backend,
                    page_size=plan.page_size,
                    cuda_graphs=plan.cuda_graphs,
                    points=points,
                    tp=plan.tp,
                    steps=plan.steps,
                    out=str(scratch / f"{len(made)}.json"),
                    trace=trace,
                )
            )
    return made


def measure(plan: Plan, *, out: Path | None = None, say: Callable[[str], None] = print) -> StepRun:
    """Run the plan, a process after the other; `out` is rewritten after each. Raises BadInput.

    A process that fails or runs out of time keeps what it has measured; the rest of its points are left out
    and `say` tells. BadInput only if no process measured anything.
    """
    plan.check()
    _need_gpu()
    with tempfile.TemporaryDirectory(prefix="kvlab-step-") as made:
        folder, name = rank_folder(plan, Path(made))
        done: list[StepRun] = []
        ended = time.monotonic() + plan.timeout
        waiting = children(replace(plan, model=name), folder, Path(made))
        running = [_Running(waiting.pop(0))]
        try:
            while running:
                # The next one imports SGLang meanwhile.
                if waiting:
                    running.append(_Running(waiting.pop(0)))
                now, left = running[0], ended - time.monotonic()
                say(f"{now.child.strategy}, pool {now.child.pool:,}")
                why = now.take_turn(left, say)
                running.pop(0)
                if Path(now.child.out).exists():
                    done.append(read(Path(now.child.out)))
                    if out is not None:
                        write(out, merge(done))
                if why:
                    say(f"{now.child.strategy}: {why}")
        finally:
            for one in running:
                one.stop()
    if not done:
        raise BadInput("bench step: no process measured anything; its output above says why")
    return merge(done)


def rank_folder(plan: Plan, scratch: Path) -> tuple[Path, str]:
    """The rank's folder and the model's name: --model may be a preset, or the folder of a rank."""
    given = Path(plan.model)
    config = given / "config.json"
    if config.is_file():
        try:
            said = json.loads(config.read_text("utf-8")).get("kvlab_rank_of")
        except (ValueError, AttributeError) as e:
            raise BadInput(f"--model: {config}: not a config.json ({e})") from None
        if said is not None:
            return given, said.partition(",")[0]
    shape = dummy.rank_config(models.load(plan.model), tp=plan.tp, layers=plan.layers)
    name = Path(plan.model).name
    return dummy.write_rank(scratch / "rank", shape), name


class _Running:
    """A started process. It imports SGLang at once, and touches the GPU when it is given its turn."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._turn = Path(f"{child.out}.turn")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with the turn
        env = {**os.environ, "KVLAB_PATCH": "off", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvlab.bench.step_child", msgspec.json.encode(asdict(child)).decode()],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**env, "KVLAB_BENCH_TURN": str(self._turn)},
        )

    def take_turn(self, seconds: float, say: Callable[[str], None]) -> str:
        """Let it run to its end, its lines to `say`; why it failed, or nothing."""
        process = self._process

        def pass_on() -> None:
            for line in process.stdout or ():
                say(f"  {line.rstrip()}")

        self._turn.touch()
        reader = threading.Thread(target=pass_on, daemon=True)
        reader.start()
        why = ""
        try:
            process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            why = "ran out of time"
        finally:
            self.stop()
            reader.join(2)
        if process.returncode and not why:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            for line in lines[-25:]:
                say(f"  {line}")
            why = f"ended with {process.returncode}: {lines[-1] if lines else 'no output'}"
        self._log.close()
        return why

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _need_gpu() -> None:
    from kvlab.provenance import collect

    if not collect().gpus:
        raise BadInput("bench step: needs an NVIDIA GPU here; print a recorded run with --recorded")
    import importlib.util

    missing = [m for m in ("torch", "sglang") if importlib.util.find_spec(m) is None]
    if missing:
        raise BadInput(f"bench step: needs {' and '.join(missing)}; install it, or use --recorded")


def numbers(name: str, text: str) -> tuple[int, ...]:
    """`1,16,64` as integers. Raises BadInput."""
    parts: Sequence[str] = [t.strip().replace("_", "") for t in text.split(",")]
    if not all(t.isdigit() and int(t) for t in parts):
        raise BadInput(f"{name}: expected whole numbers such as 1,16, got {text!r}")
    return tuple(int(t) for t in parts)
