"""The book's Sphinx extension: outputs found by source hash, the {n} role, numbers in math, two tables."""

import difflib
import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective, SphinxRole

from kvlab.book import exports, run, units, values
from kvlab.book.pages import Page, digest, pages
from kvlab.errors import BadInput

VALUES_PAGE = "book/where-numbers-come-from"
_VAL = re.compile(r"\\val\{([^{}]*)\}")
_EVERYTHING = "*"
# Sources of a value that are shown open.
_AT_A_GLANCE = 6
_THEBE = re.compile(
    r'<script type="text/x-thebe-config">.*?</script>|<script>kernelName = .*?</script>', re.S
)


class Library:
    """The executed pages that this build shows, and the values they export."""

    def __init__(self, root: Path, chosen_run: str | None = None) -> None:
        self.root = root
        self.pages: list[Page] = pages(root)
        executed = run.runs(root)
        self.executed: dict[str, run.Executed] = {}
        for page in self.pages:
            if page.cells and (found := run.newest(page, executed, chosen_run)):
                self.executed[page.name] = found
        self.by_source = {p.source_sha256: p for p in self.pages}

    def page_of(self, docname: str) -> str:
        return docname.rpartition("/")[2]

    def find(self, target: str, page: str) -> tuple[str, str, values.Value]:
        """`name` of this page or `page.name` of another: the page, the name, the value. Raises BadInput."""
        owner, _, name = target.rpartition(".")
        owner = owner or page
        executed = self.executed.get(owner)
        if executed is None:
            raise BadInput(
                f"{target}: no page {owner!r} with values; there are {', '.join(self.executed) or 'none'}"
            )
        found = executed.values.get(name)
        if found is None:
            near = difflib.get_close_matches(name, executed.values, n=3) or list(executed.values)[:5]
            raise BadInput(f"{target}: {owner} exports no {name!r}; it has {', '.join(near) or 'nothing'}")
        return owner, name, exports.from_dict(name, found)

    def state(self, key: str) -> str | None:
        """A digest of one value (`page.name`) or of everything: whether a page that showed it is stale."""
        if key == _EVERYTHING:
            return digest("".join(json.dumps(e.kvlab, sort_keys=True) for e in self.executed.values()))
        owner, _, name = key.rpartition(".")
        executed = self.executed.get(owner)
        found = executed.values.get(name) if executed else None
        return digest(json.dumps(found, sort_keys=True)) if found else None


def split_target(text: str) -> tuple[str, str]:
    """A role's text `name:format` as (name, format)."""
    name, _, spec = text.partition(":")
    return name.strip(), spec.strip()


_library: Library | None = None


def library() -> Library:
    if _library is None:
        raise ExtensionError("kvlab.book.sphinxext: no build is running")
    return _library


def _load(app: Sphinx) -> None:
    global _library
    from kvlab.book import assets

    _library = Library(Path(app.srcdir), app.config.kvlab_run or None)
    app.config.html_static_path.append(str(assets.prepare(Path(app.outdir).parent / "assets")))


def read(text: str) -> Any:
    """nb_custom_formats' reader: the page's own source with the outputs of its execution."""
    import nbformat
    from myst_nb.core.read import read_myst_markdown_notebook

    nb = read_myst_markdown_notebook(text, add_source_map=True)
    cells = [c for c in nb.cells if c.cell_type == "code"]
    page = library().by_source.get(digest(text))
    if not cells:
        return nb
    executed = library().executed.get(page.name) if page else None
    if executed is None:
        raise ExtensionError(
            f"{page.name if page else 'a page'} has not been executed; python -m kvlab book build does both"
        )
    done = nbformat.read(executed.path, as_version=4)
    own = [
        c
        for c in done.cells
        if c.cell_type == "code" and "injected-parameters" not in c.metadata.get("tags", [])
    ]
    for cell, outputs in zip(cells, own, strict=True):
        cell.outputs = [
            o for o in outputs.outputs if not o.get("metadata", {}).get("kvlab", {}).get("export")
        ]
        cell.execution_count = outputs.execution_count
    nb.metadata.setdefault("kernelspec", done.metadata.kernelspec)
    nb.metadata.setdefault("language_info", done.metadata.get("language_info", {"name": "python"}))
    return nb


def _used(env: BuildEnvironment) -> dict[str, dict[str, str | None]]:
    if not hasattr(env, "kvlab_used"):
        env.kvlab_used = {}
        env.kvlab_outputs = {}
    return env.kvlab_used


def _note(env: BuildEnvironment, docname: str, key: str) -> None:
    _used(env).setdefault(docname, {})[key] = library().state(key)


def _outputs_of(docname: str) -> str | None:
    executed = library().executed.get(library().page_of(docname))
    return run.file_sha256(executed.path) if executed else None


def _outdated(app: Sphinx, env: BuildEnvironment, *_: Any) -> Iterable[str]:
    """Pages whose outputs or quoted values changed while their .md did not."""
    _used(env)
    stale = {d for d, used in _used(env).items() if any(library().state(k) != s for k, s in used.items())}
    stale |= {d for d, sha in env.kvlab_outputs.items() if _outputs_of(d) != sha}
    return [d for d in stale if d in env.found_docs]


def _purge(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    _used(env).pop(docname, None)
    env.kvlab_outputs.pop(docname, None)


def _remember(app: Sphinx, doctree: nodes.document) -> None:
    _used(app.env)
    app.env.kvlab_outputs[app.env.docname] = _outputs_of(app.env.docname)


def _anchor(owner: str, name: str) -> str:
    return nodes.make_id(f"n-{owner}-{name}")


class NumberRole(SphinxRole):
    """{n}`name:format`: a value of this page, or {n}`page.name:format` of another; its origin on hover."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        target, spec = split_target(self.text)
        try:
            owner, name, value = library().find(target, library().page_of(self.env.docname))
            shown = format(value, spec)
        except BadInput as e:
            problem = self.inliner.reporter.error(f"{{n}}`{self.text}`: {e}", line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, problem)], [problem]
        _note(self.env, self.env.docname, f"{owner}.{name}")
        here = self.env.docname == VALUES_PAGE
        depth = self.env.docname.count("/")
        page = "" if here else "../" * depth + VALUES_PAGE + ".html"
        return [
            nodes.reference(
                self.rawtext,
                shown,
                internal=True,
                refuri=f"{page}#{_anchor(owner, name)}",
                reftitle=values.describe(value),
                classes=["kv-n"],
            )
        ], []


class NumbersInMath(SphinxTransform):
    r"""`\val{name:format}` in math becomes the value."""

    default_priority = 200

    def apply(self, **_: Any) -> None:
        for node in [*self.document.findall(nodes.math), *self.document.findall(nodes.math_block)]:
            text = node.astext()
            if "\\val" not in text:
                continue
            done = _VAL.sub(self._one, text)
            node.clear()
            node += nodes.Text(done)
            node.rawsource = done

    def _one(self, m: re.Match) -> str:
        target, spec = split_target(m[1])
        docname = self.env.docname
        try:
            owner, name, value = library().find(target, library().page_of(docname))
            shown = units.to_tex(format(value, spec), words=isinstance(value.value, str))
        except BadInput as e:
            self.document.reporter.error(f"\\val{{{m[1]}}}: {e}")
            return m[0]
        _note(self.env, docname, f"{owner}.{name}")
        return "{" + shown + "}"


class NoLinkInSummary(SphinxTransform):
    """A link inside a fold's summary is a control inside a control: the number keeps its tooltip only."""

    default_priority = 220

    def apply(self, **_: Any) -> None:
        for fold in self.document.findall(nodes.container):
            if fold.get("design_component") != "dropdown" or not fold.get("has_title"):
                continue
            for link in list(fold[0].findall(nodes.reference)):
                if "kv-n" not in link["classes"]:
                    continue
                text = f'<span class="kv-n" title="{escape(link["reftitle"])}">{escape(link.astext())}</span>'
                link.replace_self(nodes.raw("", text, format="html"))


class table_figure(nodes.figure):
    """A captioned table of a code cell: numbered among the tables, not among the figures."""


class TablesAreNoFigures(SphinxTransform):
    """myst-nb wraps whatever a cell shows into a figure; what show_table() made becomes a table_figure."""

    default_priority = 210

    def apply(self, **_: Any) -> None:
        for node in list(self.document.findall(nodes.figure)):
            if not any('class="table kv-table"' in raw.astext() for raw in node.findall(nodes.raw)):
                continue
            table = table_figure("", *node.children, **node.attributes)
            table.source, table.line = node.source, node.line
            node.replace_self(table)
            for id_ in table["ids"]:
                self.document.ids[id_] = table


def _visit_table_figure(self: Any, node: nodes.Element) -> None:
    self.visit_figure(node)


def _depart_table_figure(self: Any, node: nodes.Element) -> None:
    self.depart_figure(node)


def _caption_of(node: nodes.Element) -> str | None:
    return next((c.astext() for c in node.children if isinstance(c, nodes.caption)), None)


class ValueOrigins(SphinxDirective):
    """Every value that the pages export, with where it comes from."""

    def run(self) -> list[nodes.Node]:
        _note(self.env, self.env.docname, _EVERYTHING)
        out: list[nodes.Node] = []
        for page in library().pages:
            executed = library().executed.get(page.name)
            if not executed or not executed.values:
                continue
            title = _title(page)
            section = nodes.section(
                ids=[nodes.make_id(f"values-{page.name}")], names=[f"values of {page.name}"]
            )
            section += nodes.title("", title)
            rows = []
            for name, found in executed.values.items():
                value = exports.from_dict(name, found)
                first = nodes.paragraph("", "", nodes.literal("", name))
                origin = _origin(value.origin.kind, value.origin.how, [s.text for s in value.origin.sources])
                rows.append(
                    ([_anchor(page.name, name)], [[first], [nodes.paragraph("", format(value))], origin])
                )
            section += _table(["name", "value", "where it comes from"], rows, [2, 2, 6])
            out.append(section)
        return out


def _origin(kind: str, how: str, sources: list[str]) -> list[nodes.Node]:
    """How a value came about, and from what: a list, closed where it is longer than one reads at a glance."""
    if kind in ("recorded", "reported") and len(sources) == 1:
        # Its source says all of `how`.
        return [nodes.paragraph("", f"{kind}: {sources[0]}")]
    said = [nodes.paragraph("", f"{kind}: {how}")]
    if not sources:
        return said
    listed = nodes.bullet_list("", *(nodes.list_item("", nodes.paragraph("", t)) for t in sources))
    if len(sources) <= _AT_A_GLANCE:
        return [*said, listed]
    opening = f"<details><summary>from {len(sources)} figures</summary>"
    return [*said, nodes.raw("", opening, format="html"), listed, nodes.raw("", "</details>", format="html")]


class ExecutionStatus(SphinxDirective):
    """How long each page took, where and when it ran, with which versions."""

    def run(self) -> list[nodes.Node]:
        _note(self.env, self.env.docname, _EVERYTHING)
        rows = []
        versions: dict[str, set[str]] = {}
        for page in library().pages:
            executed = library().executed.get(page.name)
            if executed is None:
                continue
            k, p = executed.kvlab, executed.kvlab["provenance"]
            host = ", ".join(p["gpus"]) or "CPU only"
            given = ", ".join(f"{n} = {v}" for n, v in k["parameters"].items()) or "defaults"
            commit = (p["commit"] or "unknown")[:10] + (", with changes" if p["dirty"] else "")
            cells = [
                _title(page),
                f"{k['seconds']:.1f} s",
                p["date"][:16].replace("T", " "),
                host,
                given,
                commit,
                executed.path.parent.name,
            ]
            rows.append(([], [[nodes.paragraph("", c)] for c in cells]))
            everything = {
                "Python": p["python"],
                "platform": p["platform"],
                "kvlab": p["kvlab"],
                **p["versions"],
            }
            everything["KVLAB_PATCH"] = p["kvlab_patch"]
            everything["driver"] = p["driver"] or "none"
            for name, version in everything.items():
                versions.setdefault(name, set()).add(version)
        heads = ["page", "run time", "executed at (UTC)", "GPU", "parameters", "commit", "run"]
        version_rows = [
            ([], [[nodes.paragraph("", n)], [nodes.paragraph("", ", ".join(sorted(v)))]])
            for n, v in versions.items()
        ]
        return [_table(heads, rows, [3, 1, 2, 2, 2, 2, 1]), _table(["what", "version"], version_rows, [1, 3])]


def _title(page: Page) -> str:
    """The page's heading as plain text, its {n} resolved."""
    heading = next((line[2:] for line in page.text.splitlines() if line.startswith("# ")), page.name)

    def resolve(m: re.Match) -> str:
        target, spec = split_target(m[1])
        return format(library().find(target, page.name)[2], spec)

    return re.sub(r"[*_`]", "", re.sub(r"\{n\}`([^`]*)`", resolve, heading)).strip()


def _table(
    heads: list[str], rows: list[tuple[list[str], list[list[nodes.Node]]]], widths: list[int]
) -> nodes.Node:
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=w) for w in widths]
    head = nodes.row("", *[nodes.entry("", nodes.paragraph("", h)) for h in heads])
    body = [nodes.row("", *[nodes.entry("", *cell) for cell in cells], ids=ids) for ids, cells in rows]
    group += [nodes.thead("", head), nodes.tbody("", *body)]
    return nodes.container("", nodes.table("", group, classes=["kv-origins"]), classes=["kv-scroll"])


def _page_scripts(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """No Thebe; plotly only on a page that has a figure; no list role whose children are no list items; the
    theme's scrolling tables within reach of the keyboard.
    """
    if "body" in context:
        body = _THEBE.sub("", context["body"])
        body = body.replace('<div role="list" class="citation-list">', "<div>")
        table = '<div class="pst-scrollable-table-container"'
        context["body"] = body.replace(table, f'{table} tabindex="0"')
    context["script_files"][:] = [s for s in context["script_files"] if "thebe" not in _script(s)]
    context["css_files"][:] = [
        c for c in context["css_files"] if "thebe" not in str(getattr(c, "filename", c))
    ]
    if 'class="kv-figure"' in str(context.get("body", "")):
        app.add_js_file("plotly.min.js", loading_method="")


def _script(script: Any) -> str:
    return (
        f"{getattr(script, 'filename', script)} {getattr(script, 'attributes', {}).get('body', '')}".lower()
    )


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("kvlab_run", "", "env")
    app.add_config_value("kvlab_code", "", "env")
    app.add_config_value("kvlab_static", "", "html")
    app.connect("builder-inited", _load, priority=100)
    app.connect("env-get-outdated", _outdated)
    app.connect("env-purge-doc", _purge)
    app.connect("doctree-read", _remember)
    app.connect("html-page-context", _page_scripts, priority=900)
    app.add_role("n", NumberRole())
    app.add_transform(NumbersInMath)
    app.add_transform(TablesAreNoFigures)
    app.add_transform(NoLinkInSummary)
    html = (_visit_table_figure, _depart_table_figure)
    app.add_enumerable_node(table_figure, "table", _caption_of, html=html)
    app.add_directive("value-origins", ValueOrigins)
    app.add_directive("execution-status", ExecutionStatus)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
