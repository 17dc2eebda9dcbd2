"""What does this process serve each backend with, and what does it know of it?

Decisions are made once a backend and call kind, before capture, and logged in one line.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvlab.kernels.checks import FP8_DTYPES, WIDE_DTYPES
from kvlab.patch import beneath, calls, policy, server
from kvlab.patch.counters import Counters
from kvlab.patch.policy import Choice, Facts
from kvlab.patch.saying import Said, one_line
from kvlab.patch.scratch import Scratch
from kvlab.patch.sites import Site
from kvlab.patch.standing import Basis, Standing, a_layer
from kvlab.patch.strategies import Plain, Strategy, all_strategies
from kvlab.patch.trust import Trust, Writes

_STEP = {"decode": "a decode step", "extend": "an extend step"}


class UnservedBackend(SystemExit):
    """Strict mode: a backend would be served unpatched. SGLang swallows every other exception of a plugin."""


@dataclass
class BackendState:
    """What is known of one backend object."""

    family: str
    server_args: Any = None
    graphs: bool = False
    generation: int = 0
    choices: dict[Facts, Choice] = field(default_factory=dict)
    # By call kind: what the last call was decided on.
    standing: dict[str, Standing] = field(default_factory=dict)
    write_refusal: Writes = field(default_factory=dict)
    graph: Any = None


class Runtime:
    """The patch's state in this process."""

    def __init__(
        self, asked: str, *, is_strict: bool, version: str | None, before: "Runtime | None" = None
    ) -> None:
        """`before`: whose place this one takes in a process that may serve already."""
        self.asked, self.is_strict, self.version = asked, is_strict, version
        self.is_active = True
        self.counters = Counters()
        self.scratch = Scratch()
        self.said = Said()
        self.strategies: dict[str, Strategy] = all_strategies()
        self.trust = Trust(self.strategies, self.said.warn)
        self.has_captured = False
        self.is_refreshing = False
        self.has_given_up = False
        self.server: dict[str, Any] = before.server if before is not None else {}
        self.on_change: Callable[[bool], None] = lambda force: None
        self.states: weakref.WeakKeyDictionary[Any, BackendState] = weakref.WeakKeyDictionary()
        self.chosen: dict[str, Choice] = {}
        self.unpatched: dict[str, str] = {}
        # By site: who else wraps its method, beneath us.
        self.wrapped: dict[str, str] = {}
        # By site: the class, the name of its method and what we put there.
        self.placed: dict[str, tuple[type, str, Any]] = {}
        for backend, state in before.states.items() if before is not None else ():
            # A backend is built once: what was seen then is still so.
            self.states[backend] = BackendState(state.family, state.server_args, state.graphs)

    def built(self, family: str, backend: Any, model_runner: Any) -> None:
        """After a backend's `__init__`: decide, check and log before anything is captured."""
        state = self.state(family, backend)
        state.server_args = getattr(model_runner, "server_args", None)
        self.server = self.server or server.identity(model_runner)
        pool = getattr(model_runner, "token_to_kv_pool", None) or getattr(backend, "token_to_kv_pool", None)
        if pool is None or not getattr(backend, "use_mla", True):
            return
        if getattr(pool, "dtype", None) not in FP8_DTYPES or getattr(pool, "store_dtype", None) == pool.dtype:
            self._left(family, pool)
            return
        try:
            rows = a_layer(pool)
        except (AttributeError, IndexError, TypeError):
            return
        kinds = self._reached(family, server.kinds(backend))
        if not kinds:
            return
        # Graphs come later, or never.
        has_graphs = not getattr(state.server_args, "disable_cuda_graph", False)
        outside = server.outside(state.server_args, has_graphs)
        if outside is not None:
            self.chosen.update({f"{family}.{kind}": Choice("stock", outside) for kind in kinds})
            self._unserved(family, f"{' and '.join(kinds)} left to stock: {outside}")
            return
        if "decode" in kinds and (traced := server.traced_by_compile(state.server_args)) is not None:
            line = f"SGLang {self.version}, {family}: {traced}"
            if self.is_strict and self.asked != "stock":
                raise UnservedBackend(f"kvlab: KVLAB_PATCH_STRICT: {line}")
            self.say(line)
        with self.trust.together(rows.device):
            self._decide_all(family, kinds, backend, model_runner, pool, rows)
        if rows.device.type == "cuda":
            # What the checks took is given back: a server's peak is to be stock's at most.
            torch.cuda.empty_cache()
        self._announce(family, kinds, pool, rows)

    def _reached(self, family: str, kinds: Sequence[str]) -> list[str]:
        """The kinds whose calls come to us; of the others, it is said who has put something in our place."""
        lost = {kind: why for kind in kinds if (why := self.displaced(f"{family}.{kind}")) is not None}
        for kind, why in lost.items():
            self.chosen[f"{family}.{kind}"] = Choice("stock", why)
            line = f"SGLang {self.version}, {family}, {self.asked}: {kind} left to stock: {why}"
            if self.is_strict and self.asked != "stock":
                raise UnservedBackend(f"kvlab: KVLAB_PATCH_STRICT: {line}")
            self.say(line)
            self.on_change(True)
        return [kind for kind in kinds if kind not in lost]

    def displaced(self, site: str) -> str | None:
        """Who stands where we put the seam of `site` without calling it, or None: it is in place."""
        cls, name, ours = self.placed.get(site, (None, "", None))
        top = None if cls is None else vars(cls).get(name)
        if top is ours or beneath.leads_to(top, lambda one: one is ours):
            return None
        return f"{name} has been replaced by {beneath.told(top)} since, which does not call the patch"

    def _decide_all(
        self,
        family: str,
        kinds: Sequence[str],
        backend: Any,
        model_runner: Any,
        pool: Any,
        rows: torch.Tensor,
    ) -> None:
        state = self.state(family, backend)
        config = getattr(model_runner, "model_config", None)
        for kind in kinds:
            facts = Facts(
                kind=kind,
                device=rows.device,
                slots=rows.shape[0],
                width=rows.shape[-1],
                fp8=pool.dtype,
                q_dtype=getattr(model_runner, "dtype", torch.bfloat16),
                heads=server.heads(config, state.server_args),
                rank=getattr(config, "kv_lora_rank", None),
                page_size=backend.page_size if family == "fa3" else 1,
                family=family,
            )
            if facts.q_dtype in WIDE_DTYPES:
                self.choice(state, facts)
                if self.asked != "stock":
                    self.trust.write_refusal(pool, facts, state.write_refusal)
                    if kind == "decode" and state.choices[facts].strategy == "shadow":
                        self.trust.joint_refusal(facts)

    def graphs_ready(self, family: str, backend: Any) -> None:
        """After `init_cuda_graph_state`: from now on the scratch lasts; ask for it before capture."""
        state = self.state(family, backend)
        state.graphs = True
        state.standing.clear()
        for facts, choice in list(state.choices.items()):
            # Extend is captured only with speculation or captured prefill; its first warm-up call asks then.
            if facts.kind == "decode" and choice.strategy == "shadow":
                self._reserve(state, facts)

    def metadata_ready(self, family: str, backend: Any, step: "Step") -> None:
        """After a metadata hook: a new pass begins, perhaps a capture. A replay's is `replayed`."""
        state = self.state(family, backend)
        state.generation += 1
        # Without graphs, what is kept for a pass is memory that another backend's pass is to find free.
        for ended in (state,) if state.graphs else list(self.states.values()):
            ended.standing.clear()
        state.graph = None
        if step.is_capture:
            state.graph = id(backend), step.mode, step.batch
            self.counters.capture(state.graph)
        self.on_change(False)

    def replayed(self, family: str, backend: Any, mode: Any, batch: int, tokens: Any) -> None:
        """A captured pass is about to be replayed: before every step of a server, so no more than it needs.

        `tokens`: cached tokens of the batch, where the host knows them; else anything that is no integer.
        """
        state = self.states.get(backend) or self.state(family, backend)
        state.generation += 1
        if state.standing:
            state.standing.clear()
        key = state.graph = id(backend), mode, batch
        self.counters.replay(key, tokens if isinstance(tokens, int) else None)
        self.on_change(False)

    def call(self, site: Site, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `original(*args, **kwargs)` returns, through the seam (`calls.through`)."""
        return calls.through(self, site, original)(*args, **kwargs)

    def decide(self, state: BackendState, site: Site, basis: Basis, rows: torch.Tensor) -> Standing:
        """What the calls of `basis` get."""
        width = rows.shape[-1]
        if width != basis.head_dim or basis.q_dtype not in WIDE_DTYPES:
            # A prefill that attends to its own wide rows, with heads of another width, asks for no cast.
            why = f"rows of {width}, head_dim {basis.head_dim}, {basis.q_dtype} queries"
            return Standing(basis, why)
        facts = Facts(
            kind=site.kind,
            device=rows.device,
            slots=rows.shape[0],
            width=width,
            fp8=basis.fp8,
            q_dtype=basis.q_dtype,
            heads=basis.heads,
            rank=basis.rank,
            page_size=basis.page_size,
            family=site.family,
        )
        outside = server.outside(state.server_args, state.graphs)
        if outside is not None:
            return Standing(basis, facts=facts, outside=outside)
        chosen = self.choice(state, facts).strategy
        strategy = self.strategies.get(chosen)
        return Standing(
            basis,
            facts=facts,
            name=chosen,
            strategy=strategy,
            enters=getattr(type(strategy), "enter", None) is not Plain.enter,
            lane=server.lane(state.server_args, site.kind),
        )

    def choice(self, state: BackendState, facts: Facts) -> Choice:
        """The strategy for such calls, decided once."""
        found = state.choices.get(facts)
        if found is None or found.strategy in self.trust.broken:
            found = policy.choose(self.asked, facts, functools.partial(self._refusal, state))
            state.choices[facts] = found
            self.chosen[f"{facts.family}.{facts.kind}"] = found
        return found

    def _refusal(self, state: BackendState, strategy: str, facts: Facts) -> str | None:
        """Why `strategy` may not have such calls of this backend, or None."""
        if not self.strategies[strategy].is_exact and server.is_deterministic(state.server_args):
            # A request's bits must not depend on who is served beside it: how a long one is cut does.
            return "deterministic inference"
        if self.strategies[strategy].takes_over and (
            other := self.wrapped.get(f"{facts.family}.{facts.kind}")
        ):
            # It would neither see nor change what comes from behind its back.
            return other
        return self.trust.refusal(strategy, facts)

    def native_kv_dtype(self, backend: Any) -> torch.dtype | None:
        """The KV dtype to plan decode with where `native` serves it, else None."""
        state = self.states.get(backend) if backend is not None else None
        if state is None or not self.is_active:
            return None
        for facts, choice in state.choices.items():
            if facts.kind == "decode" and choice.strategy == "native" and "native" not in self.trust.broken:
                return facts.fp8
        return None

    def broke(
        self, strategy: str, error: BaseException | str, outcome: str = "stock served the call"
    ) -> None:
        """A strategy failed while serving: nobody takes it again, and one line says so."""
        if strategy not in self.trust.broken:
            why = error if isinstance(error, str) else one_line(error)
            self.trust.broken[strategy] = f"failed while serving: {why}"
            for state in list(self.states.values()):
                state.standing.clear()
            self.say(f"{strategy} failed ({why}); {outcome}, {strategy} is not used again")
            self.on_change(True)

    def _reserve(self, state: BackendState, facts: Facts) -> None:
        if facts.device.type != "cuda":
            return
        try:
            self.scratch.reserve(facts.device, server.lane(state.server_args, facts.kind), facts.layer_bytes)
        except torch.OutOfMemoryError as e:
            self.broke("shadow", e, "no call was lost")

    def not_patched(self, sites: Sequence[Site], error: BaseException) -> None:
        """The patch broke while it was put in and was taken out again; strict mode does not serve so."""
        why = f"the patch failed to go in: {one_line(error)}"
        line = f"SGLang {self.version}, {sites[0].family} left to stock: {why}"
        if self.is_strict:
            raise UnservedBackend(f"kvlab: KVLAB_PATCH_STRICT: {line}")
        self.unpatched.update({site.name: why for site in sites})
        self.say(line)

    def replaced(self, site: Site, why: str) -> None:
        """What is to be patched is not the code that was recognised; strict mode does not serve so."""
        line = f"SGLang {self.version}, {site.name} left to stock: {why}"
        if self.is_strict:
            raise UnservedBackend(f"kvlab: KVLAB_PATCH_STRICT: {line}")
        self.unpatched[site.name] = why
        self.say(line)

    def gave_up(self, hook: str, error: BaseException) -> None:
        """What we do behind SGLang's method `hook` broke, so nothing that was decided may stand: stock serves
        from now on. Strict mode does not come up so.
        """
        why = f"failed behind {hook}: {one_line(error)}"
        if self.is_strict and hook in ("__init__", "init_cuda_graph_state"):
            raise UnservedBackend(f"kvlab: KVLAB_PATCH_STRICT: SGLang {self.version}: the patch {why}")
        for state in list(self.states.values()):
            state.generation += 1
            state.standing.clear()
        if not self.has_given_up:
            self.has_given_up = True
            for strategy in self.strategies:
                self.trust.broken.setdefault(strategy, why)
            self.say(f"the patch {why}; stock serves from now on")
            self.on_change(True)

    def say(self, line: str) -> None:
        """One warning, once."""
        self.said.warn(line)

    def _left(self, family: str, pool: Any) -> None:
        name = type(pool).__name__
        if "FP4" in name:
            # It dequantises itself whole inside get_key_buffer: there is no cast to defer.
            self._unserved(family, f"{name} left to stock: FP4 rows are dequantised by the pool itself")
            return
        dtype = str(getattr(pool, "dtype", None)).removeprefix("torch.")
        self.said.tell(f"{family}: {name} left to stock: {dtype} rows need no cast")

    def _announce(self, family: str, kinds: Sequence[str], pool: Any, rows: torch.Tensor) -> None:
        kinds = [k for k in kinds if f"{family}.{k}" in self.chosen]
        if not kinds:
            return
        parts = []
        for kind in kinds:
            c = self.chosen[f"{family}.{kind}"]
            parts.append(f"{kind} {c.strategy}" + (f" ({c.reason})" if c.reason else ""))
        if all(self.chosen[f"{family}.{k}"].strategy == "stock" for k in kinds):
            self._unserved(family, ", ".join(parts))
            return
        layers = len(getattr(pool, "full_kv_pool", pool).kv_buffer)
        saved = 3 * rows.shape[0] * rows.shape[-1] * layers
        self.said.tell(
            f"SGLang {self.version}, {family}, {self.asked}: {', '.join(parts)}; {_STEP[kinds[0]]} no longer "
            f"casts {rows.shape[0]:,} slots x {layers} layers, {saved / 1e9:.1f} GB of traffic"
        )
        self.on_change(True)

    def _unserved(self, family: str, why: str) -> None:
        """Stock has every call of a backend; strict mode does not serve so."""
        line = f"SGLang {self.version}, {family}, {self.asked}: {why}; nothing is patched"
        if self.is_strict and self.asked != "stock":
            raise UnservedBackend(f"kvlab: KVLAB_PATCH_STRICT: {line}")
        self.said.tell(line)
        self.on_change(True)

    def state(self, family: str, backend: Any) -> BackendState:
        found = self.states.get(backend)
        if found is None:
            # Not seen being built: the patch came later.
            found = self.states[backend] = BackendState(family, server.arguments())
        return found


class Step(NamedTuple):
    """What a metadata hook says of the pass to come. `mode`: SGLang's ForwardMode, or a name."""

    mode: Any
    batch: int
    is_capture: bool = False
