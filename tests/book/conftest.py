"""The built book, and a real headless Chromium without a network."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Even a request that slipped past the recorder would find no address.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]


def kvlab(*args, cwd=ROOT, **env):
    """`python -m kvlab …` as a reader would run it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KVLAB_DATA")}
    return subprocess.run(
        [sys.executable, "-m", "kvlab", *args], cwd=cwd, capture_output=True, text=True, env={**clean, **env}
    )


@pytest.fixture(scope="session")
def html():
    """_build/html of this checkout, brought up to date."""
    done = kvlab("book", "build")
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def served(html):
    """The address of the book on a loopback port."""
    from kvlab.book.serve import server

    with server(html, 0) as s:
        thread = threading.Thread(target=s.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{s.server_address[1]}"
        s.shutdown()
        thread.join()


def _chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    return None


@pytest.fixture(scope="session")
def chromium():
    path = _chromium()
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no browser: CI must open the pages in Chromium (apt-get install chromium)")
        pytest.skip("no browser: install Chromium to have the pages opened")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()


class Visit:
    """One page in a fresh context: what it asked for, what it complained about."""

    def __init__(self, browser, **options):
        self.foreign, self.errors = [], []
        self.context = browser.new_context(**options)
        self.context.route("**/*", self._route)
        self.context.add_init_script(path=Path(__file__).with_name("probe.js"))
        self.page = self.context.new_page()
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))

    def _note(self, message):
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _route(self, route):
        url = route.request.url
        if url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")):
            route.continue_()
        else:
            self.foreign.append(url)
            route.abort()

    def open(self, url):
        self.page.goto(url, wait_until="load")
        # Fonts, MathJax and plotly draw after load.
        self.page.evaluate("() => document.fonts.ready")
        self.page.evaluate("() => window.MathJax && MathJax.startup ? MathJax.startup.promise : null")
        drawn = (
            "[...document.querySelectorAll('.plotly-graph-div')].every(d => d.querySelector('svg.main-svg'))"
        )
        self.page.wait_for_function(drawn)
        return self.page


@pytest.fixture
def visit(chromium):
    visits = []

    def make(**options):
        visits.append(Visit(chromium, **options))
        return visits[-1]

    yield make
    for v in visits:
        v.context.close()
