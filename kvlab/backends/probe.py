"""What the extractors share: finding a check in a syntax tree, running a release's function on CPU."""

from __future__ import annotations

import ast
import builtins
import logging
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from kvlab.backends.sources import Module


def message(node: ast.AST) -> str:
    """The text of the string constants below a node; what an f-string fills in is `{…}`."""
    parts: list[str] = []

    def visit(n: ast.AST) -> None:
        if isinstance(n, ast.Constant) and isinstance(n.value, str):
            parts.append(n.value)
        elif isinstance(n, ast.FormattedValue):
            parts.append("{" + ast.unparse(n.value) + "}")
        else:
            for child in ast.iter_child_nodes(n):
                visit(child)

    visit(node)
    return "".join(parts)


def raises(body: list[ast.stmt]) -> ast.Raise | None:
    """The `raise` that a branch ends in."""
    return next((s for s in body if isinstance(s, ast.Raise)), None)


def constants(node: ast.AST) -> list[Any]:
    """Literals of a list, tuple or set; for a literal, itself."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [c for e in node.elts for c in constants(e)]
    return [node.value] if isinstance(node, ast.Constant) else []


def ifs(node: ast.AST) -> Iterator[ast.If]:
    """Every `if` below a node, outermost first."""
    for child in ast.walk(node):
        if isinstance(child, ast.If):
            yield child


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of a function or method of that name."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            func = child.func
            if (isinstance(func, ast.Name) and func.id == name) or (
                isinstance(func, ast.Attribute) and func.attr == name
            ):
                yield child


def assigned(module: Module, name: str) -> ast.Assign | None:
    """The module's top-level assignment to `name`."""
    for node in module.ast.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            return node
    return None


class Stub(SimpleNamespace):
    """Stands in for an object of which a function reads attributes: those given, and None for any other."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def namespace(values: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[str, Any]:
    """Globals for `Module.real`: `values`, and an `import` that finds only `modules` and the standard
    library.

    Nothing of the release is imported, so that its compiled extensions are not needed.
    """

    def load(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        for known, module in modules.items():
            if name == known or name.startswith(known + "."):
                return module
        return builtins.__import__(name, globals, locals, fromlist, level)

    quiet = logging.getLogger("kvlab.backends.probe")
    quiet.disabled = True
    return {"__builtins__": {**vars(builtins), "__import__": load}, "logger": quiet, **values}


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or `{"raises": type, "says": text}`."""
    try:
        return call()
    except (ValueError, AssertionError, RuntimeError) as e:
        return {"raises": type(e).__name__, "says": str(e)}
