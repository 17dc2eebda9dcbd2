"""The sources of every SGLang release from 0.5.8 on and of flashinfer, as `kvlab.backends` keeps them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvlab.backends import sources
from kvlab.backends.extract import SGLANG

# Pinned by SGLang 0.5.9 and 0.5.15.post1, the measured host's, and the newest.
FLASHINFER = ["0.6.3", "0.6.12", "0.6.18.post1", "0.7.2", "0.7.4"]


def source(package: str, version: str) -> Path:
    """The folder that holds the package's module folder: of what was fetched, or of this environment."""
    tree = sources.at_hand(package, version)
    if tree is None:
        raise LookupError(f"{package} {version}: run tests/sglang/fetch_sources.py first")
    return tree.root


def main() -> int:
    wanted = [("sglang", v, False) for v in SGLANG]
    # Others import these (tests/sources), which may run at the same time.
    wanted += [("flashinfer-python", v, True) for v in FLASHINFER]
    with ThreadPoolExecutor(4) as pool:
        for tree in pool.map(lambda w: sources.fetch(w[0], w[1], whole=w[2]), wanted):
            print(tree.package, tree.release)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
