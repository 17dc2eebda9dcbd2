"""Where does this SGLang cast its pool? Read from its source, without importing it.

A site is recognised by what the code is: a method `forward_decode` or `forward_extend` of the backend's class
that contains `<holder>.token_to_kv_pool.get_key_buffer(…).to(…)`, hands the wide rows to the attention kernel
and to nobody else, and reads the metadata that the adapter will read, in a class that tells when it is made.
Release numbers decide nothing, so a newer release with the same seam is patched and an older one that was
fixed by hand is not.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from kvlab.patch.metadata_hooks import why_untold

RECOGNISED = "recognised"
LEFT_ALONE = "left alone"
# The seam needs these to be the first parameters, in this order.
_SIGNATURE = ("self", "q", "k", "v", "layer", "forward_batch")
# What may become of the wide rows: other views of them, what they look like, and the attention kernels.
_VIEWS = ("view", "paged_view", "reshape", "unsqueeze", "squeeze")
_SHAPES = ("shape", "dtype", "device")
_KERNELS = ("run", "flash_attn_with_kvcache")


# Decorators that leave a method what it is.
_PLAIN = ("torch.no_grad()", "torch.inference_mode()", "torch.compiler.disable", "override")


@dataclass(frozen=True)
class Family:
    """One attention backend: where it lives and which attributes its adapter reads, by call kind."""

    name: str
    module: str
    cls: str
    reads: dict[str, tuple[str, ...]]

    @property
    def path(self) -> str:
        return self.module.removeprefix("sglang.").replace(".", "/") + ".py"


FAMILIES = (
    Family(
        "flashinfer_mla",
        "sglang.srt.layers.attention.flashinfer_mla_backend",
        "FlashInferMLAAttnBackend",
        {"decode": ("forward_metadata", "decode_wrapper"), "extend": ("forward_metadata", "prefill_wrapper")},
    ),
    Family(
        "fa3",
        "sglang.srt.layers.attention.flashattention_backend",
        "FlashAttentionBackend",
        dict.fromkeys(("decode", "extend"), ("forward_metadata", "page_table", "cache_seqlens_int32")),
    ),
)
KINDS = ("decode", "extend")


@dataclass(frozen=True)
class Site:
    """One place that casts the pool. `holder`: who holds the pool there, `self` or `forward_batch`."""

    family: str
    kind: str
    module: str
    cls: str
    state: str
    reason: str = ""
    line: int = 0
    holder: str = ""

    @cached_property
    def name(self) -> str:
        return f"{self.family}.{self.kind}"

    @property
    def method(self) -> str:
        return f"forward_{self.kind}"

    def left(self, reason: str) -> "Site":
        return replace(self, state=LEFT_ALONE, reason=reason)


@dataclass(frozen=True)
class Installed:
    """The SGLang of this environment: its version, its package folder and what its source casts."""

    version: str | None
    root: Path | None
    sites: tuple[Site, ...]

    @property
    def recognised(self) -> tuple[Site, ...]:
        return tuple(s for s in self.sites if s.state == RECOGNISED)


def installed() -> Installed:
    """Look at the installed SGLang. Nothing of it is imported."""
    spec = importlib.util.find_spec("sglang")
    # A mere folder of that name is a namespace package, without an origin.
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return Installed(None, None, ())
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        version = None
    root = Path(next(iter(spec.submodule_search_locations)))
    return Installed(version, root, tuple(find(root)))


def find(root: Path) -> Iterator[Site]:
    """Every site of the SGLang package under `root`, recognised or left alone with a reason."""
    for family in FAMILIES:
        path = root / family.path
        blank = [Site(family.name, kind, family.module, family.cls, LEFT_ALONE) for kind in KINDS]
        try:
            # As Python reads it, whatever its encoding is.
            tree = ast.parse(path.read_bytes())
        except FileNotFoundError:
            yield from (s.left(f"this release has no {family.path}") for s in blank)
            continue
        except OSError as e:
            yield from (s.left(f"{family.path} cannot be read: {e.strerror}") for s in blank)
            continue
        except (SyntaxError, ValueError) as e:
            where = f"line {e.lineno}" if isinstance(e, SyntaxError) and e.lineno else str(e)
            yield from (s.left(f"{family.path} does not parse: {where}") for s in blank)
            continue
        yield from (recognise(family, site, tree) for site in blank)


def recognise(family: Family, site: Site, tree: ast.Module) -> Site:
    """`site` as `tree` shows it."""
    cls = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == family.cls), None)
    if cls is None:
        return site.left(f"{family.path} has no class {family.cls}")
    if _is_bound_again(tree.body, family.cls):
        return site.left(f"{family.path} defines {family.cls} more than once")
    method = next((n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == site.method), None)
    if method is None:
        return site.left(f"{family.cls} has no {site.method}")
    if _is_bound_again(cls.body, site.method):
        return site.left(f"{family.cls} defines {site.method} more than once")
    around = [d for d in map(ast.unparse, method.decorator_list) if d not in _PLAIN]
    if around:
        return site.left(f"{site.method} is decorated with {around[0]}")
    if tuple(a.arg for a in method.args.args[: len(_SIGNATURE)]) != _SIGNATURE:
        return site.left(f"{site.method} does not begin with ({', '.join(_SIGNATURE)})")
    casts = list(pool_casts(method))
    if not casts:
        return site.left(f"{site.method} casts no pool: already fixed, or not the code we know")
    reads = sum(isinstance(n, ast.Attribute) and n.attr == "get_key_buffer" for n in ast.walk(method))
    if len(casts) > 1 or reads > 1:
        return site.left(
            f"{site.method} reads the pool's rows {reads} times, casting {len(casts)}; once is what we know"
        )
    line, holder = casts[0]
    if holder not in ("self", "forward_batch"):
        return replace(site.left(f"the pool is held by {holder!r}, not by self or forward_batch"), line=line)
    if (other := _other_use(method)) is not None:
        more = (
            f"{site.method} does more with the wide rows than hand them to the attention kernel: line {other}"
        )
        return replace(site.left(more), line=line)
    named = {n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)}
    missing = [a for a in family.reads[site.kind] if a not in named]
    if missing:
        return replace(site.left(f"{site.method} does not read {', '.join(missing)}"), line=line)
    if (untold := why_untold(cls)) is not None:
        return replace(site.left(untold), line=line)
    return replace(site, state=RECOGNISED, line=line, holder=holder)


def _is_bound_again(body: list[ast.stmt], name: str) -> bool:
    return sum(name in _binds(node) for node in body) > 1


def _binds(node: ast.stmt) -> set[str]:
    """The names that a statement of a module's or class's body gives a value, in its branches too."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
        return set().union(*(_binds(n) for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)))
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def pool_casts(method: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """(line, holder) of each `<holder>.token_to_kv_pool.get_key_buffer(…).to(…)`."""
    for cast in _casts(method):
        read = cast.func.value
        pool = read.func.value
        is_held = isinstance(pool, ast.Attribute) and pool.attr == "token_to_kv_pool"
        yield read.lineno, ast.unparse(pool.value if is_held else pool)


def _casts(method: ast.FunctionDef) -> Iterator[Any]:
    """The calls `….get_key_buffer(…).to(…)`."""
    for node in ast.walk(method):
        if _is_method(node, "to") and _is_method(node.func.value, "get_key_buffer"):
            yield node


def _is_method(node: Any, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _other_use(method: ast.FunctionDef) -> int | None:
    """The line of a use of the wide rows other than by the attention kernel, which reads no row that the
    metadata does not name; None where there is none.
    """
    parents = {child: node for node in ast.walk(method) for child in ast.iter_child_nodes(node)}
    todo: list[Any] = list(_casts(method))
    while todo:
        rows = todo.pop()
        user = parents[rows]
        if isinstance(user, ast.Subscript) and user.value is rows:
            todo.append(user)
        elif isinstance(user, ast.Attribute) and _is_method(parents[user], user.attr) and user.attr in _VIEWS:
            todo.append(parents[user])
        elif isinstance(user, ast.Attribute) and user.attr in _SHAPES:
            continue
        elif isinstance(user, ast.Assign) and all(isinstance(t, ast.Name) for t in user.targets):
            names = {t.id for t in user.targets}
            # A name may stand for something else before.
            todo += [
                n
                for n in ast.walk(method)
                if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)
                if n.lineno > (user.end_lineno or user.lineno)
            ]
        else:
            call = parents[user] if isinstance(user, ast.keyword) else user
            callee = ast.unparse(call.func).split(".")[-1] if isinstance(call, ast.Call) else ""
            if callee in _VIEWS:
                todo.append(call)
            elif callee not in _KERNELS or not _reads_the_tables(call):
                return rows.lineno
    return None


def _reads_the_tables(kernel: ast.Call) -> bool:
    """Is the kernel handed the page table that a metadata object holds, not one that is made for it?"""
    tables = (k.value for k in kernel.keywords if k.arg == "page_table")
    return all(isinstance(t, ast.Name | ast.Attribute) for t in tables)
