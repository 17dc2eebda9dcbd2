"""What would an SGLang maintainer change? The smallest edit at each cast site, as a unified diff.

Each site's expression `<pool>.get_key_buffer(layer.layer_id).to(q.dtype)` becomes a call of
`cast_active_rows`, a new module of which the text is upstream.py's; the slots come from what the method
already has at hand.
"""

import ast
import difflib
from pathlib import Path

from kvlab.errors import BadInput
from kvlab.patch import sites
from kvlab.patch.sites import Family, Site

_MODULE = "srt/layers/attention/active_rows.py"
_IMPORT = "from sglang.srt.layers.attention.active_rows import cast_active_rows\n"


def unified(installed: sites.Installed) -> str:
    """The diff for `installed`, to be applied with `patch -p1` in the folder that holds `sglang/`.

    Raises BadInput where no SGLang is installed or none of its sites is recognised.
    """
    if installed.root is None:
        raise BadInput("sglang: not installed in this environment; run patch diff where SGLang is")
    if not installed.recognised:
        why = "; ".join(f"{s.name}: {s.reason}" for s in installed.sites)
        raise BadInput(f"sglang {installed.version}: no site to change ({why})")
    parts = []
    for family in sites.FAMILIES:
        its = [s for s in installed.recognised if s.family == family.name]
        if its:
            path = installed.root / family.path
            old = path.read_text(encoding="utf-8")
            parts.append(_diff(family.path, old, edited(old, family, its)))
    helper = (Path(__file__).parent / "upstream.py").read_text(encoding="utf-8")
    parts.append(_diff(_MODULE, None, helper))
    return "".join(parts)


def edited(source: str, family: Family, its: list[Site]) -> str:
    """`source` with the casts of `its` replaced and the helper imported."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    for site in sorted(its, key=lambda s: -s.line):
        node = _cast(tree, site)
        pool = ast.unparse(node.func.value)
        indent = " " * (len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip()))
        head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        tail = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        stock = " ".join(ast.unparse(node).split())
        call = ["cast_active_rows(", f"    {pool},", "    q.dtype,"]
        call += [f"    {a}," for a in _arguments(family, site)] + [")"]
        if family.name == "fa3":
            # Cascade attention reads a second table on the same buffer.
            call = (
                ["(", f"    {stock}", "    if use_cascade_attn", f"    else {call[0]}"]
                + [f"    {line}" for line in call[1:]]
                + [")"]
            )
        first, *rest = call
        call = [f"{head}{first}\n", *(f"{indent}{line}\n" for line in rest)]
        call[-1] = call[-1].rstrip("\n") + tail
        lines[node.lineno - 1 : node.end_lineno] = call
    after = _last_sglang_import(tree)
    lines.insert(after, _IMPORT)
    return "".join(lines)


def _arguments(family: Family, site: Site) -> list[str]:
    """How the site's method names the slots that its kernel reads."""
    if family.name == "fa3":
        return ["metadata.page_table", "metadata.cache_seqlens_int32", "self.page_size"]
    if site.kind == "decode":
        # Under CUDA graphs only this tensor's lengths are fresh.
        return ["decode_wrapper._kv_indices_buf", "self.kv_indptr[: decode_wrapper._kv_indptr_buf.numel()]"]
    return ["prefill_wrapper_paged._kv_indices_buf", "prefill_wrapper_paged._kv_indptr_buf"]


def _cast(tree: ast.Module, site: Site) -> ast.Call:
    """The `….get_key_buffer(…).to(…)` of a site."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "to"
            and isinstance(node.func.value, ast.Call)
            and isinstance(node.func.value.func, ast.Attribute)
            and node.func.value.func.attr == "get_key_buffer"
            and node.func.value.lineno == site.line
        ):
            return node
    raise LookupError(f"{site.name}: line {site.line} casts no pool any more")


def _last_sglang_import(tree: ast.Module) -> int:
    """The line after the last top-level import of SGLang's own."""
    ends = [
        n.end_lineno or n.lineno
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("sglang.")
    ]
    return max(ends, default=0)


def _diff(path: str, old: str | None, new: str) -> str:
    return "".join(
        difflib.unified_diff(
            [] if old is None else old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            "/dev/null" if old is None else f"a/sglang/{path}",
            f"b/sglang/{path}",
        )
    )
