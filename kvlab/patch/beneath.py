"""What does a method lead to? Other plugins wrap what we know from its source, replace it and put it back."""

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

# Callables that are looked at before the answer is no.
_MOST = 500


def is_from(module: ModuleType, name: str, line: int) -> Callable[[Any], bool]:
    """Is a callable the function `name` around `line` of `module`'s own source?"""

    def is_it(one: Any) -> bool:
        if not isinstance(one, FunctionType) or one.__globals__ is not vars(module):
            return False
        code = one.__code__
        last = max((n for _, _, n in code.co_lines() if n is not None), default=code.co_firstlineno)
        return code.co_name == name and code.co_firstlineno <= line <= last

    return is_it


def leads_to(method: Any, is_it: Callable[[Any], bool]) -> bool:
    """Is `method`, or a callable that it holds and so may call, one for which `is_it` is true?

    `__wrapped__` alone proves nothing: SGLang's own hooks that replace a function set it too.
    """
    todo, seen = [method], set()
    while todo and len(seen) < _MOST:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_it(one):
            return True
        todo += [x for x in _held(one) if callable(x) and not isinstance(x, ModuleType)]
    return False


def told(method: Any) -> str:
    """A callable by its module and name."""
    where = getattr(method, "__globals__", {}).get("__name__") or getattr(method, "__module__", None)
    name = getattr(method, "__qualname__", type(method).__qualname__)
    return f"{where}.{name}" if where else name


def _held(one: Any) -> Iterator[Any]:
    if isinstance(one, MethodType | staticmethod | classmethod):
        yield one.__func__
        if isinstance(one, MethodType):
            yield from _inside(one.__self__)
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, FunctionType):
        for cell in one.__closure__ or ():
            try:
                yield from _inside(cell.cell_contents)
            except ValueError:  # nothing is in it yet
                continue
        yield from (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
        if not _is_sglang_s(one.__globals__.get("__name__")):
            named = (one.__globals__.get(n) for n in one.__code__.co_names)
            for found in named:
                yield from _inside(found)
    elif not (isinstance(one, type) and _is_sglang_s(one.__module__)):
        yield from _inside(getattr(one, "__dict__", None))


def _inside(found: Any) -> Iterator[Any]:
    """What is kept in it, where it is a container; else itself."""
    if isinstance(found, dict):
        yield from list(found.values())
    elif isinstance(found, list | tuple | set):
        yield from list(found)
    else:
        yield found


def _is_sglang_s(module: Any) -> bool:
    return str(module).split(".")[0] == "sglang"
