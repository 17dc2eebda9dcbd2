"""What became of each claim of the source text? The ledger as a table of the book."""

from collections import Counter
from collections.abc import Mapping
from html import escape

import msgspec

from kvlab.book.evidence import claims
from kvlab.book.values import Value, describe
from kvlab.errors import BadInput

VERDICTS = ("confirmed", "corrected", "untestable here")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One claim: the text's own words, the verdict and why, the page that decides it, the test that pins it.

    `page` is `name#place`.
    """

    id: str
    quote: str
    quantity: str
    verdict: str
    why: str
    page: str
    test: str | None = None
    value: float | None = None
    unit: str | None = None
    also: dict[str, float] = {}


def entries() -> list[Claim]:
    """Every claim, in the ledger's order. Raises BadInput for a key or verdict that the ledger has not."""
    found = []
    for entry in claims().values():
        try:
            claim = msgspec.convert(entry, Claim, strict=True)
        except msgspec.ValidationError as e:
            raise BadInput(f"data/reported/claims.yml: claim {entry.get('id')!r}: {e}") from None
        if claim.verdict not in VERDICTS:
            raise BadInput(
                f"data/reported/claims.yml: claim {claim.id!r}: verdict {claim.verdict!r} is none of "
                f"{', '.join(VERDICTS)}"
            )
        if "#" not in claim.page:
            raise BadInput(
                f"data/reported/claims.yml: claim {claim.id!r}: page {claim.page!r} names no place; write "
                f"{claim.page}#PLACE"
            )
        found.append(claim)
    return found


def counts() -> dict[str, int]:
    """How many claims have each verdict."""
    found = Counter(c.verdict for c in entries())
    return {v: found[v] for v in VERDICTS}


def show_ledger(right: Mapping[str, tuple[Value, str]] | None = None) -> None:
    """Display the ledger: quote, verdict and why, and links to where each claim is decided.

    `right` gives corrected claims, by id, the figure that came out and its format. An id that the ledger
    has not, or that is not corrected, is refused.
    """
    from IPython.display import display

    right = right or {}
    unknown = set(right) - {c.id for c in entries() if c.verdict == "corrected"}
    if unknown:
        raise BadInput(f"show_ledger: no corrected claim {', '.join(sorted(unknown))}")
    rows = "".join(_row(c, right.get(c.id)) for c in entries())
    html = (
        '<div class="kv-scroll kv-ledger" tabindex="0" role="region" aria-label="the ledger of claims">'
        '<table class="table"><thead><tr><th scope="col">the text</th><th scope="col">verdict</th>'
        '<th scope="col">decided</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    plain = "\n".join(f"{c.verdict}\t{c.quote}\t{c.page}" for c in entries())
    display({"text/html": html, "text/plain": plain}, raw=True)


def _row(c: Claim, right: tuple[Value, str] | None = None) -> str:
    page, _, place = c.page.partition("#")
    link = f'<a href="{escape(page)}.html#{escape(place)}">{escape(page)}</a>'
    test = f"<br><code>{escape(c.test.rpartition('::')[2])}</code>" if c.test else ""
    kind = c.verdict.split()[0]
    figure = ""
    if right is not None:
        value, spec = right
        shown = escape(format(value, spec))
        figure = f': <span class="kv-n" title="{escape(describe(value))}">{shown}</span>'
    return (
        f'<tr id="claim-{escape(c.id)}"><td>“{escape(c.quote)}”</td>'
        f'<td><strong class="kv-verdict-{kind}">{escape(c.verdict)}</strong>{figure}. {escape(c.why)}</td>'
        f"<td>{link}{test}</td></tr>"
    )
