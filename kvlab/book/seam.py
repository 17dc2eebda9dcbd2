"""Where does the patch stand in a call? The picture of its chapter, in HTML so that a phone wraps it."""

from html import escape

# (SGLang's own line, what stands there while the patch is applied, whether the view is in place)
_CALL = (
    ("forward_decode(q, k, v, …)", "the backend is lent a view of its pool, for this call", False),
    (
        "pool.set_mla_kv_buffer(…)",
        "the new row, byte for byte as stock writes it; at once, or with the cast",
        True,
    ),
    ("pool.get_key_buffer(layer)", "the real one is called; its FP8 rows come back as a deferred cast", True),
    (".to(q.dtype)", "the strategy casts what this call reads, or leaves it to stock", True),
    ("wrapper.run(q, rows, …)", "flashinfer's kernel, untouched: same lengths, same values", True),
    ("return o", "the backend has its own pool again", False),
)


def show_seam() -> None:
    """Display the call, line by line, and what the patch does at each. Caption and name are the cell's."""
    from IPython.display import display

    rows = "".join(
        f'<li class="{"kv-lent" if inside else "kv-own"}"><code>{escape(line)}</code>'
        f"<span>{escape(does)}</span></li>"
        for line, does, inside in _CALL
    )
    html = f'<ol class="kv-seam" aria-label="one call through the seam">{rows}</ol>'
    plain = "\n".join(f"{line}\t{does}" for line, does, _ in _CALL)
    display({"text/html": html, "text/plain": plain}, raw=True)
