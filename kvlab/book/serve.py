"""The built book on a loopback port."""

import functools
import http.server
from pathlib import Path

from kvlab.errors import BadInput


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A page is hundreds of requests: say nothing."""


def server(html: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server of `html` on 127.0.0.1; port 0 takes a free one. BadInput for no book or a port in use."""
    if not (html / "index.html").is_file():
        raise BadInput(f"{html}: no built book here; run make book (python -m kvlab book build) first")
    handler = functools.partial(_Quiet, directory=str(html))
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as e:
        raise BadInput(f"--port {port}: {getattr(e, 'strerror', None) or e}; choose another") from None
