"""Is any number typed by hand? Sources, parsed as MyST and Python, hold none outside roles and parameters.

In prose, tables, captions, math and README a numeral with a unit, a percent sign, an x, a decimal point or
a thousands separator, or of three digits and more, must come from {n}, \\val{} or a README marker. Names such
as SM120 stand in names.yml. Code cells hold no number beyond 0, 1 and 2, and no such numeral in a string.
"""

import ast
import functools
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.book import readme
from kvlab.book.pages import Page, pages
from kvlab.errors import BadInput


class Orphan(NamedTuple):
    """A numeral without origin: the file, its line, the kind of place and the numeral as found."""

    file: str
    line: int
    place: str
    numeral: str

    def __str__(self) -> str:
        how = {
            "math": "write \\val{name:format}",
            "code cell": "take it from recorded(), reported(), compute() or the parameters cell",
            "README": "write <!--n page.name:format-->…<!--/n-->",
        }.get(self.place, "write {n}`name:format`")
        return f"{self.file}:{self.line}: {self.numeral!r} in {self.place} has no origin; {how}"


_PHYSICAL = (
    r"[KMGT]i?B|kB|B|bytes?|bits?|[munµ]s|s|secs?|seconds?|milliseconds?|microseconds?|min|minutes?|hours?|h"
    r"|[KMGT]?Hz|[KMGT]?FLOPS?|FLOPs?|W|watts?|tok|°C|percent"
)
_COUNTED = (
    r"tokens?|slots?|layers?|heads?|pages?|rows?|elements?|casts?|copies|copy|kernels?|launches|steps?"
    r"|requests?|GPUs?|cards?|ranks?|dimensions?|calls?|times"
)
_NUMERAL = re.compile(
    r"(?<![\w.#/\\])(?P<times>×\s?|x(?=\d))?"
    r"(?P<number>\d{1,3}(?:[,\u00a0\u2009\u202f' ]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
    rf"(?P<unit>[\s\u00a0\u202f-]?(?:%|[x×](?![a-wyzA-Z])|(?:{_PHYSICAL})(?:/\w+)?\b)"
    rf"|[\s\u00a0\u202f-](?:{_COUNTED})\b)?"
    r"(?!\w)"
)
_MATH_NUMERAL = re.compile(
    r"(?<![\w.])(?P<number>\d+(?:(?:\{,\}|,|\\,)\d{3})*(?:\.\d+)?)"
    r"(?P<unit>(?:\\[,;: ]|~|\s)*"
    r"(?:\\%|\\(?:mathrm|text|operatorname|rm|mathsf)\s*\{\s*[^}]*[A-Za-zµ%][^}]*\}))?"
)
# Directives whose body is MyST, by what their argument is.
_TITLED = {
    "note", "tip", "hint", "important", "warning", "caution", "attention", "danger", "error", "seealso",
    "admonition", "dropdown", "toggle", "card", "grid", "grid-item", "grid-item-card", "tab-set", "tab-item",
    "table", "list-table", "csv-table", "epigraph", "sidebar", "margin", "topic", "glossary", "rubric",
    "container", "div", "details",
}  # fmt: skip
_CAPTIONED = {"figure", "image"}
_NO_TEXT = {
    "toctree", "tableofcontents", "bibliography", "value-origins", "execution-status", "contents", "mermaid",
}  # fmt: skip
_CODE = {"code", "code-block", "sourcecode", "literalinclude", "prompt", ""}
_REFERENCE_ROLES = {
    "n",
    "ref",
    "numref",
    "doc",
    "eq",
    "term",
    "cite",
    "cite:p",
    "cite:t",
    "download",
    "footcite",
}
_TEXT_OPTIONS = {"alt", "caption", "title", "subtitle", "header", "footer", "name-text"}
_CODE_LISTINGS = {"bash", "sh", "shell", "zsh", "python", "ipython3", "toml", "yaml", "diff"}
_COMMAND = re.compile(
    r"^(?:\$ |[A-Z_]+=\S+ )?(?:python3?|pip|make|kvlab|jb|git|docker|curl)\b|^-{1,2}[a-z][\w-]*(?:[= ]|$)"
)
_STRUCTURAL_CALLS = {"recorded", "recorded_file", "reported", "parameter"}
_FORMAT = re.compile(r"\+?,?(?:\.\d[defg]|[defg])?(?: \S+)?")


@functools.cache
def _names() -> re.Pattern:
    import yaml

    listed = yaml.safe_load(Path(__file__).with_name("names.yml").read_text("utf-8"))
    words = sorted(listed["names"], key=len, reverse=True)
    parts = [rf"(?<![\w.]){re.escape(w)}(?!\w|\.\d)" for w in words] + list(listed["patterns"])
    return re.compile("|".join(f"(?:{p})" for p in parts))


def in_text(text: str) -> list[str]:
    """The numerals of a text that need an origin, names taken out."""
    # A name becomes a word, so that what stands beside it does not run together.
    text = _names().sub("N", text)
    return [
        m[0].strip() for m in _NUMERAL.finditer(text) if _needs_origin(m["number"], m["unit"], m["times"])
    ]


def in_math(tex: str) -> list[str]:
    """The numerals of a formula that need an origin."""
    tex = re.sub(r"\\val\{[^{}]*\}", " v ", tex)
    tex = re.sub(r"\\(?:label|tag|ref|eqref|begin|end|hspace|vspace|color)\*?\{[^{}]*\}", " ", tex)
    found = [m[0].strip() for m in _MATH_NUMERAL.finditer(tex) if _needs_origin(m["number"], m["unit"])]
    words = " ".join(re.findall(r"\\(?:text|mathrm)\{([^{}]*)\}", tex))
    return found + [n for n in in_text(words) if n not in " ".join(found)]


def _needs_origin(number: str, unit: str | None, times: str | None = None) -> bool:
    if times or "." in number or len(number) >= 3 or not number.isdigit():
        return True
    if not unit:
        return False
    # "1 layer" and "2 GPUs" are grammar, "1 B" and "2 %" are figures.
    counted = re.fullmatch(rf"[\s\u00a0\u202f-]?(?:{_COUNTED})", unit)
    return not (counted and number in ("0", "1", "2"))


def check(root: Path) -> list[str]:
    """Every orphan of the book and README.md, a line each."""
    found = [o for page in pages(root) for o in check_page(page)]
    found += check_readme((root / "README.md").read_text("utf-8"))
    return [str(o) for o in found]


def check_page(page: Page) -> list[Orphan]:
    """Orphans of one page: prose, tables, captions, math and code cells."""
    name = f"book/{page.path.name}"
    found = list(_markdown(page.text, name, 0, "prose"))
    for cell in page.cells:
        caption = cell.metadata.get("mystnb", {}).get("figure", {}).get("caption", "")
        found += [o._replace(line=cell.line) for o in _markdown(str(caption), name, cell.line, "caption")]
        if "parameters" not in cell.tags:
            found += code(cell.source, name, cell.before_code)
    return found


def check_readme(text: str) -> list[Orphan]:
    """Orphans of README.md: as a page's, where a marked figure counts as having an origin."""
    bare = readme.MARK.sub(lambda m: "value" + "\n" * m[0].count("\n"), text)
    return [o._replace(place="README") for o in _markdown(bare, "README.md", 0, "README")]


def code(source: str, file: str, line: int) -> list[Orphan]:
    """Numbers beyond 0, 1 and 2 in a cell, and numerals in the strings that it shows.

    Strings that address data (arguments of recorded() and reported(), keys, formats, colours) are no text.
    """
    lines = source.splitlines()
    cell_magic = source.lstrip().startswith("%%")
    magic = [cell_magic or x.lstrip().startswith(("%", "!")) for x in lines]
    found = [
        Orphan(file, line + i, "code cell", n)
        for i, x in enumerate(lines, 1)
        if magic[i - 1]
        for n in in_text(x)
    ]
    body = "\n".join("" if m else x for x, m in zip(lines, magic, strict=True))
    try:
        tree = ast.parse(body)
    except SyntaxError as e:
        raise BadInput(f"{file}: the code cell at line {line} is no Python ({e.msg})") from None
    address = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) in _STRUCTURAL_CALLS
        ):
            address |= {id(x) for a in [*node.args, *node.keywords] for x in ast.walk(a)}
        if isinstance(node, ast.FormattedValue) and node.format_spec:
            address |= {id(x) for x in ast.walk(node.format_spec)}
        if isinstance(node, ast.Subscript):
            address |= {
                id(x)
                for x in ast.walk(node.slice)
                if isinstance(x, ast.Constant) and isinstance(x.value, str)
            }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant):
            continue
        at = line + node.lineno
        if isinstance(node.value, int | float | complex) and not isinstance(node.value, bool):
            if node.value not in (0, 1, 2):
                found.append(Orphan(file, at, "code cell", ast.unparse(node)))
        elif isinstance(node.value, str) and id(node) not in address and not _FORMAT.fullmatch(node.value):
            found += [Orphan(file, at, "code cell", n) for n in in_text(node.value)]
    return found


def _parser() -> Any:
    from markdown_it.renderer import RendererHTML
    from myst_parser.config.main import MdParserConfig
    from myst_parser.parsers.mdit import create_md_parser

    extensions = {"amsmath", "colon_fence", "deflist", "dollarmath", "attrs_inline", "tasklist", "linkify"}
    config = MdParserConfig(enable_extensions=extensions, dmath_double_inline=True)
    return create_md_parser(config, RendererHTML)


def _markdown(text: str, file: str, offset: int, place: str) -> Iterator[Orphan]:
    in_table = 0
    for token in _parser().parse(text):
        line = offset + (token.map[0] + 1 if token.map else 1)
        in_table += {"table_open": 1, "table_close": -1}.get(token.type, 0)
        here = "table" if in_table and place == "prose" else place
        if token.type == "front_matter":
            yield from _front_matter(token.content, file, line)
        elif token.type == "inline":
            yield from _inline(token.children or [], file, line, here)
        elif token.type in ("math_block", "math_block_label", "amsmath"):
            yield from (Orphan(file, line, "math", n) for n in in_math(token.content))
        elif token.type in ("fence", "colon_fence"):
            yield from _fence(token.info.strip(), token.content, file, line, here)
        elif token.type == "code_block":
            yield from (Orphan(file, line, here, n) for n in in_text(token.content))
        elif token.type == "html_block":
            yield from (Orphan(file, line, here, n) for n in in_text(_html_text(token.content)))


def _inline(tokens: list[Any], file: str, line: int, place: str) -> Iterator[Orphan]:
    # Neighbouring pieces are read as one text: `**64.6** ms` has a unit, and so has `64.6 *ms*`.
    text, autolink = [], False
    for token in tokens:
        if token.type == "link_open":
            autolink = token.markup in ("linkify", "autolink")
        elif token.type == "link_close":
            autolink = False
        elif token.type == "text" and not autolink:
            text.append(token.content)
        elif token.type == "code_inline":
            text.append(" c " if _COMMAND.match(token.content) else token.content)
        elif token.type in ("softbreak", "hardbreak"):
            text.append("\n")
        elif token.type == "image":
            text.append(" " + token.content + " ")
        elif token.type in ("math_inline", "math_inline_double"):
            text.append(" m ")
            yield from (Orphan(file, line, "math", n) for n in in_math(token.content))
        elif token.type == "myst_role":
            role = token.meta["name"]
            if role == "math":
                text.append(" m ")
                yield from (Orphan(file, line, "math", n) for n in in_math(token.content))
            else:
                # A reference may carry a text of its own: {ref}`text <target>`.
                own = re.sub(r"\s*<[^>]*>$", "", token.content) if "<" in token.content else ""
                text.append((own if role in _REFERENCE_ROLES else token.content) or " r ")
        elif token.type == "html_inline":
            text.append("")
    so_far = "".join(text)
    if "```{" in so_far:
        raise BadInput(
            f"{file}:{line}: a fence whose title holds backticks is no fence; open it with :::{{name}}"
        )
    for numeral in in_text(so_far):
        yield Orphan(file, line + max(so_far.partition(numeral)[0].count("\n"), 0), place, numeral)


def _fence(info: str, content: str, file: str, line: int, place: str) -> Iterator[Orphan]:
    directive = re.match(r"\{([^}]+)\}\s*(.*)", info)
    if directive is None:
        yield from _listing(info.split(" ")[0], content, file, line, place)
        return
    name, argument = directive[1], directive[2]
    if name == "code-cell" or name in _NO_TEXT:
        return
    options, body, skipped = _options(content)
    for key, value in options.items():
        if key in _TEXT_OPTIONS:
            yield from _markdown(value, file, line, "caption" if place == "prose" else place)
    if name == "math":
        yield from (Orphan(file, line, "math", n) for n in in_math(argument + "\n" + body))
    elif name in _CODE:
        yield from _listing(argument.split(" ")[0], body, file, line, place)
    elif name in _CAPTIONED:
        yield from _markdown(body, file, line + skipped, "caption")
    elif name in _TITLED or ":" in name:
        inner = "table" if name.endswith("table") and place == "prose" else place
        title = "caption" if name.endswith("table") else place
        yield from _markdown(argument, file, line - 1, title)
        if name == "csv-table":
            body = body.replace('"', " ")
        yield from _markdown(body, file, line + skipped, inner)
    else:
        # Better a false alarm than a place to hide a number.
        yield from (Orphan(file, line, place, n) for n in in_text(argument + "\n" + body))


def _listing(language: str, content: str, file: str, line: int, place: str) -> Iterator[Orphan]:
    """A listing: commands and code are inputs, what they print is a claim."""
    for i, row in enumerate(content.splitlines()):
        if language == "console" and row.startswith(("$ ", "> ")):
            continue
        if language in _CODE_LISTINGS:
            # A trailing comment is prose.
            row = row.partition("# ")[2]
        yield from (Orphan(file, line + i + 1, place, n) for n in in_text(row))


def _options(content: str) -> tuple[dict[str, str], str, int]:
    import yaml

    lines = content.splitlines()
    if lines and lines[0].strip() == "---" and "---" in [x.strip() for x in lines[1:]]:
        end = [x.strip() for x in lines].index("---", 1)
        found = yaml.safe_load("\n".join(lines[1:end])) or {}
        return {str(k): str(v) for k, v in found.items()}, "\n".join(lines[end + 1 :]), end + 1
    options, n = {}, 0
    while n < len(lines) and (m := re.match(r":([\w-]+):\s*(.*)", lines[n])):
        options[m[1]], n = m[2], n + 1
    return options, "\n".join(lines[n:]), n


def _front_matter(content: str, file: str, line: int) -> Iterator[Orphan]:
    import yaml

    found = yaml.safe_load(content) or {}
    for key in ("title", "subtitle", "description", "substitutions", "myst", "html_meta"):
        if key in found:
            yield from (Orphan(file, line, "front matter", n) for n in in_text(str(found[key])))


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts += [f" {v} " for k, v in attrs if k in ("alt", "title", "aria-label") and v]


def _html_text(html: str) -> str:
    parser = _Text()
    parser.feed(html)
    return "".join(parser.parts)
