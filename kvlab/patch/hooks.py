"""Put the seam into SGLang's classes, and take it out again leaving the very objects that were there.

A module that is not imported yet is patched right after its import, so nothing of SGLang is imported early.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from kvlab.patch import beneath, plan_hooks, staged
from kvlab.patch.calls import through
from kvlab.patch.replacements import Replacements
from kvlab.patch.runtime import Runtime, Step
from kvlab.patch.sites import Site


def install(
    runtime: Runtime, sites: Sequence[Site], done: Replacements, mark: Callable[[Site], None]
) -> None:
    """Patch the recognised `sites` of every module that is loaded, and the others when they are.

    `mark(site)` is told of each site that is in place. A module is patched whole or not at all.
    """
    by_module: dict[str, list[Site]] = {}
    for site in sites:
        by_module.setdefault(site.module, []).append(site)
    pending = {}
    for name, its in by_module.items():
        module = sys.modules.get(name)
        if module is not None and hasattr(module, its[0].cls):
            _patch_module(runtime, module, its, done, mark)
        else:
            pending[name] = functools.partial(_patch_imported, runtime, sites=its, done=done, mark=mark)
    if by_module:
        patch_runners = functools.partial(staged.patch_runners, runtime, done)
        module = sys.modules.get(staged.MODULE)
        if module is None:
            pending[staged.MODULE] = patch_runners
        else:
            patch_runners(module)
    if pending:
        finder = AfterImport(pending)
        sys.meta_path.insert(0, finder)
        done.on_undo(functools.partial(_take_out, finder))


def _take_out(finder: importlib.abc.MetaPathFinder) -> None:
    # Somebody may have put another list there meanwhile.
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the other finders find a module and runs an action once it is loaded."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, action)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The real loader, and the action behind it."""

    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: inspect and pickling see nothing of this.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)


def _patch_imported(
    runtime: Runtime,
    module: ModuleType,
    sites: Sequence[Site],
    done: Replacements,
    mark: Callable[[Site], None],
) -> None:
    """As `_patch_module`, but the import that we are part of is SGLang's: it does not fail because of us."""
    try:
        _patch_module(runtime, module, sites, done, mark)
    except Exception as e:
        runtime.not_patched(sites, e)


def _patch_module(
    runtime: Runtime,
    module: ModuleType,
    sites: Sequence[Site],
    done: Replacements,
    mark: Callable[[Site], None],
) -> None:
    cls = getattr(module, sites[0].cls, None)
    if not isinstance(cls, type):
        return
    mine = Replacements()
    placed = {}
    try:
        sites = [site for site in sites if _is_as_read(runtime, module, vars(cls).get(site.method), site)]
        if not sites:
            return
        for site in sites:
            ours = through(runtime, site, vars(cls)[site.method])
            mine.set(cls, site.method, ours)
            placed[site.name] = cls, site.method, ours
        family = sites[0].family
        for name, after in _after(runtime, family).items():
            original = vars(cls).get(name)
            if callable(original):
                mine.set(cls, name, _then(runtime, original, after))
        if family == "flashinfer_mla":
            plan_hooks.patch_plans(runtime, module, mine)
    except Exception:
        mine.undo()
        raise
    done.extend(mine)
    runtime.placed.update(placed)
    for site in sites:
        mark(site)


def _is_as_read(runtime: Runtime, module: ModuleType, method: Any, site: Site) -> bool:
    """Is what stands there the code that `site` was read from, as it is or under wrappers that call it?"""
    is_its_own = beneath.is_from(module, site.method, site.line)
    if beneath.leads_to(method, is_its_own):
        if not is_its_own(method):
            runtime.wrapped[site.name] = f"{beneath.told(method)} lies around SGLang's method"
        return True
    what = "not there" if method is None else f"{beneath.told(method)}, which does not call SGLang's own"
    runtime.replaced(site, f"{site.method} of {site.cls} is {what}")
    return False


def _then(runtime: Runtime, original: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    """`original`, and `after` with the same arguments; a constructor's or metadata hook's result is kept."""

    @functools.wraps(original)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            after(self, *args, **kwargs)
        except Exception as e:
            # SGLang's own part is done: neither a server's start nor a step ends because of ours.
            runtime.gave_up(original.__name__, e)
        return result

    return both


def _after(runtime: Runtime, family: str) -> dict[str, Callable[..., None]]:
    """What is done after which of the class's methods. A release has some of the metadata hooks, not all."""

    def built(self: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        if runtime.is_active:
            runtime.built(family, self, model_runner)

    def graphs(self: Any, *args: Any, **kwargs: Any) -> None:
        if runtime.is_active:
            runtime.graphs_ready(family, self)

    def eager(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        mode, batch, _ = _step(forward_batch)
        runtime.metadata_ready(family, self, Step(mode, batch))

    def out_graph(self: Any, forward_batch: Any, in_capture: bool = False, *args: Any, **kwargs: Any) -> None:
        mode, batch, tokens = _step(forward_batch)
        if in_capture:
            runtime.metadata_ready(family, self, Step(mode, batch, is_capture=True))
        else:
            runtime.replayed(family, self, mode, batch, tokens)

    # The signatures of 0.5.8 to 0.5.12, alike in both backends.
    def capture(
        self: Any,
        bs: int,
        num_tokens: int,
        req_pool_indices: Any,
        seq_lens: Any,
        encoder_lens: Any,
        forward_mode: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        runtime.metadata_ready(family, self, Step(forward_mode, bs, is_capture=True))

    def replay(
        self: Any,
        bs: int,
        req_pool_indices: Any,
        seq_lens: Any,
        seq_lens_sum: Any,
        encoder_lens: Any,
        forward_mode: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        runtime.replayed(family, self, forward_mode, bs, seq_lens_sum)

    return {
        "__init__": built,
        "init_cuda_graph_state": graphs,
        "init_forward_metadata": eager,
        "init_forward_metadata_out_graph": out_graph,
        "init_forward_metadata_capture_cuda_graph": capture,
        "init_forward_metadata_replay_cuda_graph": replay,
    }


def _step(forward_batch: Any) -> tuple[Any, int, Any]:
    """Mode, requests, and cached tokens if the host knows them."""
    return (
        getattr(forward_batch, "forward_mode", None),
        getattr(forward_batch, "batch_size", 0),
        getattr(forward_batch, "seq_lens_sum", None),
    )
