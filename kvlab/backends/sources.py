"""The source of a release: where it is installed or unpacked from its wheel, as syntax trees."""

from __future__ import annotations
import __future__ as future

import ast
import functools
import importlib.util
import linecache
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvlab import locks
from kvlab.errors import BadInput

# What is kept of a wheel: the Python that checks (of flashinfer's, which grew to a hundred megabytes, what is
# read). Of compiled extensions only the messages of their checks, as text: they are hundreds of megabytes.
_KEEP = re.compile(
    r"(sglang/srt/(server_args|runtime_context|environ)\.py"
    r"|sglang/srt/(configs|arg_groups|layers/attention|mem_cache|model_executor|models|utils|plugins)/.*\.py"
    r"|sglang/kernels/ops/attention/.*\.py|(sgl_kernel|flash_mla)/.*\.py"
    r"|flashinfer/(mla|mla/.*|utils|prefill|xqa|api_logging|version|_build_meta)\.py"
    r"|triton/backends/nvidia/compiler\.py|[^/]*\.dist-info/METADATA)"
)
# What importing it takes.
_KEEP_WHOLE = re.compile(_KEEP.pattern + r"|flashinfer/(?!data/).*\.py")
_COMPILED = re.compile(r"(sgl_kernel/flashmla_ops|sgl_kernel/sm100/common_ops|flash_mla/_C_legacy)\.abi3\.so")
_MESSAGE = re.compile(rb"[\x20-\x7e]*(?:supported|must be|Expected)[\x20-\x7e]*")


def cache_root() -> Path:
    """`KVLAB_CACHE`, the checkout's `.cache`, or `~/.cache/kvlab`."""
    if chosen := os.environ.get("KVLAB_CACHE"):
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[2]
    return (
        checkout / ".cache" if (checkout / "pyproject.toml").is_file() else Path.home() / ".cache" / "kvlab"
    )


def module_name(package: str) -> str:
    """The importable name of a distribution."""
    return {
        "flashinfer-python": "flashinfer",
        "sgl-kernel": "sgl_kernel",
        "sglang-kernel": "sgl_kernel",
        "sgl-flash-mla": "flash_mla",
    }.get(package, package)


@dataclass(frozen=True)
class Tree:
    """One release of one package: `root` holds its top-level module folder."""

    package: str
    release: str
    root: Path

    @functools.cached_property
    def requires(self) -> dict[str, str]:
        """Unconditional pinned requirements, `name -> version`."""
        found = sorted(self.root.glob(f"{module_name(self.package)}*.dist-info/METADATA")) or sorted(
            self.root.glob(f"{self.package.replace('-', '_')}*.dist-info/METADATA")
        )
        pins = {}
        for line in found[0].read_text(encoding="utf-8").splitlines() if found else []:
            m = re.match(
                r"Requires-Dist: ([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*\(?==\s*([0-9][^\s;,)]*)\)?\s*$", line
            )
            if m:
                pins[m[1].lower().replace("_", "-")] = m[2]
        return pins

    def module(self, *paths: str) -> Module | None:
        """The first of `paths` that exists in this release."""
        for rel in paths:
            if (self.root / rel).is_file():
                return _module(self, rel)
        return None

    def modules(self, pattern: str) -> Iterator[Module]:
        for path in sorted(self.root.glob(pattern)):
            yield _module(self, path.relative_to(self.root).as_posix())

    def messages(self, extension: str) -> list[str]:
        """What the checks of a compiled extension say, as its string constants."""
        kept = self.root / (extension + ".messages")
        if kept.is_file():
            return kept.read_text(encoding="utf-8").splitlines()
        path = self.root / extension
        return _messages(path.read_bytes()) if path.is_file() else []


@dataclass(frozen=True)
class Module:
    """One source file of a release."""

    tree: Tree
    rel: str
    text: str

    @functools.cached_property
    def ast(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def function(self, name: str, cls: str | None = None) -> ast.FunctionDef | None:
        """The first function of that name, of class `cls` if given."""
        scope: ast.AST = self.ast
        if cls is not None:
            found = self.cls(cls)
            if found is None:
                return None
            scope = found
        for node in ast.walk(scope):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        return None

    def cls(self, name: str) -> ast.ClassDef | None:
        return next((n for n in ast.walk(self.ast) if isinstance(n, ast.ClassDef) and n.name == name), None)

    def quote(self, node: ast.AST, limit: int = 200) -> dict[str, Any]:
        """`{file, line, quote}` of a node, its lines joined."""
        text = " ".join(s.strip() for s in self.lines[node.lineno - 1 : node.end_lineno])
        if isinstance(node, ast.If):
            text = f"if {ast.unparse(node.test)}:"
        return {"file": self.rel, "line": node.lineno, "quote": text[:limit]}

    def real(self, name: str, namespace: Mapping[str, Any], cls: str | None = None) -> Callable[..., Any]:
        """The function itself, compiled alone, with `namespace` as its globals.

        Decorators are dropped and annotations stay strings; file and line numbers are the release's, so a
        traceback names its source. A name that `namespace` lacks raises NameError where the function
        reaches it. Raises LookupError where the release has no such function.
        """
        node = self.function(name, cls)
        if node is None:
            raise LookupError(f"{self.tree.package} {self.tree.release}: no function {name} in {self.rel}")
        return self._compiled(node, namespace)

    def real_class(self, name: str, namespace: Mapping[str, Any]) -> type:
        """The class itself, compiled alone like `real`; its bases are looked up in `namespace`."""
        node = self.cls(name)
        if node is None:
            raise LookupError(f"{self.tree.package} {self.tree.release}: no class {name} in {self.rel}")
        return self._compiled(node, namespace)

    def _compiled(self, node: ast.FunctionDef | ast.ClassDef, namespace: Mapping[str, Any]) -> Any:
        # A fresh parse: the cached tree keeps its decorators.
        found = next(
            n
            for n in ast.walk(ast.parse(self.text))
            if isinstance(n, ast.FunctionDef | ast.ClassDef)
            and n.name == node.name
            and n.lineno == node.lineno
        )
        found.decorator_list = []
        where = f"{self.tree.package}-{self.tree.release}/{self.rel}"
        linecache.cache[where] = (len(self.text), None, self.text.splitlines(keepends=True), where)
        code = compile(ast.Module([found], []), where, "exec", flags=future.annotations.compiler_flag)
        scope = dict(namespace)
        exec(code, scope)
        return scope[node.name]


def installed(package: str) -> Tree | None:
    """The installed release, without importing it."""
    try:
        release = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec(module_name(package))
    if spec is None or not spec.submodule_search_locations:
        return None
    return Tree(package, release, Path(next(iter(spec.submodule_search_locations))).parent)


def cached(package: str, release: str) -> Tree | None:
    """The release as unpacked before, or None."""
    root = _root(package, release)
    return Tree(package, release, root) if (root / "complete").is_file() else None


def _root(package: str, release: str) -> Path:
    return cache_root() / "sources" / f"{package}-{release}"


def at_hand(package: str, release: str) -> Tree | None:
    """The release's source if it is cached or installed, without downloading."""
    if tree := cached(package, release):
        return tree
    tree = installed(package)
    return tree if tree is not None and tree.release == release else None


def fetch(package: str, release: str, *, whole: bool = False) -> Tree:
    """The release's source, downloaded with pip where it is neither cached nor installed.

    Keeps what is read of it, not the wheel; `whole` keeps what importing flashinfer takes. Whoever wants the
    same release meanwhile waits for it. Raises BadInput where pip has no such wheel.
    """
    root = _root(package, release)
    if tree := _enough(package, release, whole):
        return tree
    with locks.held(root.with_name(f".{root.name}.lock")):
        return _enough(package, release, whole) or _download(package, release, root, whole)


def _enough(package: str, release: str, whole: bool) -> Tree | None:
    if not whole:
        return at_hand(package, release)
    return cached(package, release) if (_root(package, release) / "whole").is_file() else None


def _download(package: str, release: str, root: Path, whole: bool) -> Tree:
    with tempfile.TemporaryDirectory(dir=root.parent) as temporary:
        scratch = Path(temporary)
        wheel_path = _wheel(package, release, scratch)
        tree = scratch / "tree"
        keep = _KEEP_WHOLE if whole else _KEEP
        with zipfile.ZipFile(wheel_path) as wheel:
            wheel.extractall(tree, [n for n in wheel.namelist() if keep.fullmatch(n)])
            for name in filter(_COMPILED.fullmatch, wheel.namelist()):
                kept = tree / (name + ".messages")
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text("\n".join(_messages(wheel.read(name))), encoding="utf-8")
        (tree / "complete").touch()
        if whole:
            (tree / "whole").touch()
        shutil.rmtree(root, ignore_errors=True)
        tree.rename(root)
    return Tree(package, release, root)


def _wheel(package: str, release: str, scratch: Path) -> Path:
    """The release's wheel: one that lies in the cache already, or downloaded into `scratch`."""
    name = f"{package.replace('-', '_')}-{release}-*.whl"
    if kept := sorted((cache_root() / "wheels").glob(name)):
        return kept[0]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "-d", str(scratch / "wheel"), f"{package}=={release}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted((scratch / "wheel").glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = said[-1] if said else done.stderr[-200:]
        raise BadInput(f"{package}=={release}: pip finds no wheel of it here; {why}")
    return wheels[0]


def _messages(binary: bytes) -> list[str]:
    found = {m.decode() for m in re.findall(rb"[\x20-\x7e]{16,240}", binary) if _MESSAGE.fullmatch(m)}
    return sorted(s for s in found if not s.startswith(("_Z", ".", "@")))


@functools.lru_cache(maxsize=512)
def _module(tree: Tree, rel: str) -> Module:
    return Module(tree, rel, (tree.root / rel).read_text(encoding="utf-8"))
