"""What kind of work is this kernel? Ordered rules, read from rules.toml."""

import functools
import re
import tomllib
from importlib import resources
from typing import NamedTuple

OTHER = "other"
ORDER = (
    "dtype cast",
    "attention",
    "GEMM",
    "MoE",
    "norm/activation",
    "communication",
    "KV write",
    "copy",
    "sampling",
    OTHER,
)
"""Every class, in the order a report shows them when their times are equal."""


class Kind(NamedTuple):
    """A kernel's class, the label and role of the rule that decided, and whether a rule did."""

    cls: str
    label: str
    known: bool
    role: str = ""


@functools.cache
def rules() -> tuple[tuple[re.Pattern[str], Kind], ...]:
    """The rules in order."""
    text = resources.files(__package__).joinpath("rules.toml").read_text("utf-8")
    return tuple(
        (re.compile(r["pattern"]), Kind(r["class"], r["label"], True, r.get("role", "")))
        for r in tomllib.loads(text)["rule"]
    )


@functools.lru_cache(maxsize=65536)
def classify(name: str) -> Kind:
    """The class of a kernel by its name; `other`, with known=False, where no rule matches."""
    for pattern, kind in rules():
        if pattern.search(name):
            return kind
    return Kind(OTHER, "no rule", False)


def short(name: str) -> str:
    """A kernel's name as people say it: without return type, namespaces and arguments."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    functor = re.search(
        r"([a-z0-9_]+_kernel_cuda|CUDAFunctor\w+<[\w:]+>|\w+Functor<[\w:, ]+>|ArgMaxOps)", plain
    )
    base = re.split(r"[<(]", plain, maxsplit=1)[0].rpartition("::")[2]
    made = re.match(r"kernel_cutlass_kernel_(flashinfer\w*?Kernel)_object", plain)
    if made:
        return made[1]
    if functor and functor[1] not in base:
        return f"{base}<{functor[1]}>"
    return base
