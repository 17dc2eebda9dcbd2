"""What does a wrapper check, freeze and wrap? flashinfer's MLA wrapper read from the installed or any other
release.

The source text stopped at `inspect.getsource(BatchMLAPagedAttentionWrapper.run)`; this reads on: which
arguments
`plan` and `run` refuse, which values `plan` keeps so that a captured CUDA graph goes on using them, what
decorates the methods, and since which release an FP8 cache is accepted where.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from typing import Any

import msgspec

from kvlab.backends import extract_flashinfer, probe, rules, sources
from kvlab.errors import BadInput

WRAPPER = "BatchMLAPagedAttentionWrapper"
METHODS = ("__init__", "plan", "run")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One refusal: the condition, what is raised and what it says."""

    line: int
    test: str
    exception: str
    says: str


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One attribute that a method sets, and the expression kept. `host`: the value went to the host."""

    line: int
    name: str
    value: str
    host: bool


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """One method, read. `uses`: attributes set by `plan` or `__init__` that it reads."""

    name: str
    file: str
    line: int
    parameters: list[str]
    decorators: list[str]
    checks: list[Check]
    keeps: list[Kept]
    uses: list[str]
    source: str


class Wrapper(msgspec.Struct, frozen=True, kw_only=True):
    """A release's wrapper. `origin`: `installed` through inspect.getsource, or `downloaded`."""

    release: str
    origin: str
    methods: list[Method]

    def method(self, name: str) -> Method:
        """The method of that name. Raises BadInput."""
        for found in self.methods:
            if found.name == name:
                return found
        raise BadInput(f"--method: {name!r} is none of {', '.join(m.name for m in self.methods)}")

    def frozen(self) -> list[Kept]:
        """What `plan` keeps and `run` reads: a replayed graph has the values of capture."""
        used = set(self.method("run").uses)
        return [k for k in self.method("plan").keeps if k.name in used]


def wrapper(release: str | None = None) -> Wrapper:
    """flashinfer's MLA wrapper of a release; by default the installed one. Raises BadInput.

    The installed release is read with inspect.getsource, behind decorators; where it cannot be imported,
    and for any other release, from its files.
    """
    tree = sources.installed("flashinfer-python")
    if release is None and tree is None:
        newest = rules.releases("flashinfer-python")[-1]
        raise BadInput(f"no flashinfer is installed here; name a release, e.g. --flashinfer {newest}")
    origin = "installed"
    if tree is None or (release is not None and tree.release != release):
        assert release is not None
        rules.load("flashinfer-python", release)
        tree, origin = sources.fetch("flashinfer-python", release), "downloaded"
    found = extract_flashinfer.find(tree, "run", WRAPPER)
    if found is None:
        raise BadInput(f"flashinfer {tree.release} has no {WRAPPER}")
    module, _ = found
    cls = module.cls(WRAPPER)
    assert cls is not None
    nodes = {}
    for node in cls.body:
        # The last definition of a name counts: those before it are overloads.
        if isinstance(node, ast.FunctionDef) and node.name in METHODS:
            nodes[node.name] = node
    set_by = {k.name for n in ("__init__", "plan") if n in nodes for k in _keeps(nodes[n])}
    methods = []
    for name, node in nodes.items():
        text = (_getsource(name) if origin == "installed" else None) or _text(module.lines, node)
        methods.append(_read(node, module.rel, text, set_by))
    return Wrapper(release=tree.release, origin=origin, methods=methods)


def fp8_since() -> dict[str, str]:
    """The first flashinfer release whose wrapper reads FP8 rows itself, by kernel."""
    since: dict[str, str] = {}
    for release in rules.releases("flashinfer-python"):
        native = rules.load("flashinfer-python", release)["native_fp8"]
        for kernel in native["kernels"] if native else ():
            since.setdefault(kernel, release)
    return since


def _getsource(name: str) -> str | None:
    """inspect.getsource of the undecorated method, where flashinfer can be imported."""
    try:
        cls: Any = getattr(importlib.import_module("flashinfer.mla"), WRAPPER)
        return textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(cls, name))))
    except Exception:
        # Importing needs compiled parts and a driver that a reader's machine may lack; the files are as good.
        return None


def _text(lines: list[str], node: ast.FunctionDef) -> str:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]) + "\n")


def _read(node: ast.FunctionDef, file: str, text: str, set_by: set[str]) -> Method:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    reads = {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
        if isinstance(n.ctx, ast.Load)
    }
    return Method(
        name=node.name,
        file=file,
        line=node.lineno,
        parameters=[a.arg for a in arguments if a.arg != "self"],
        decorators=[ast.unparse(d) for d in node.decorator_list],
        checks=_checks(node),
        keeps=_keeps(node),
        uses=sorted(reads & set_by),
        source=text,
    )


def _checks(node: ast.FunctionDef) -> list[Check]:
    found = []
    for child in ast.walk(node):
        if isinstance(child, ast.Assert):
            says = probe.message(child.msg) if child.msg else ""
            found.append(
                Check(line=child.lineno, test=ast.unparse(child.test), exception="AssertionError", says=says)
            )
        elif isinstance(child, ast.If) and (raised := probe.raises(child.body)) and raised.exc:
            call = raised.exc.func if isinstance(raised.exc, ast.Call) else raised.exc
            found.append(
                Check(
                    line=child.lineno,
                    test=ast.unparse(child.test),
                    exception=ast.unparse(call),
                    says=probe.message(raised),
                )
            )
    return sorted(found, key=lambda c: c.line)


def _keeps(node: ast.FunctionDef) -> list[Kept]:
    found = []
    for child in ast.walk(node):
        if not isinstance(child, ast.Assign):
            continue
        for target in child.targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                value = ast.unparse(child.value)
                host = ".to('cpu')" in value or ".cpu()" in value
                found.append(Kept(line=child.lineno, name=target.attr, value=value, host=host))
    return sorted(found, key=lambda k: k.line)
