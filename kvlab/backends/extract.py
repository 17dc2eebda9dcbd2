"""Write the rules from the releases' sources: `python -m kvlab.backends.extract [PACKAGE==RELEASE …]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from kvlab.backends import extract_flashinfer, extract_kernels, extract_sglang, extract_triton, sources

RULES = Path(__file__).resolve().parent / "rules"
SGLANG = [
    "0.5.8",
    "0.5.8.post1",
    "0.5.9",
    "0.5.10",
    "0.5.10.post1",
    "0.5.11",
    "0.5.12",
    "0.5.12.post1",
    "0.5.13",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
]
# Every release from 0.6.0 on: any of them may be installed beside one of these SGLangs.
FLASHINFER = [
    "0.6.0",
    "0.6.1",
    "0.6.2",
    "0.6.3",
    "0.6.4",
    "0.6.5",
    "0.6.6",
    "0.6.7",
    "0.6.7.post1",
    "0.6.7.post2",
    "0.6.7.post3",
    "0.6.8",
    "0.6.8.post1",
    "0.6.9",
    "0.6.10",
    "0.6.10.post1",
    "0.6.11",
    "0.6.11.post1",
    "0.6.11.post2",
    "0.6.11.post3",
    "0.6.12",
    "0.6.13",
    "0.6.14",
    "0.6.15",
    "0.6.15.post1",
    "0.6.16",
    "0.6.16.post1",
    "0.6.16.post2",
    "0.6.16.post3",
    "0.6.16.post4",
    "0.6.17",
    "0.6.18",
    "0.6.18.post1",
    "0.7.0",
    "0.7.0.post1",
    "0.7.1",
    "0.7.2",
    "0.7.2.post1",
    "0.7.4",
]
KERNELS = [
    "sgl-kernel==0.3.21",
    "sglang-kernel==0.4.1",
    "sglang-kernel==0.4.2",
    "sglang-kernel==0.4.2.post2",
    "sglang-kernel==0.4.3",
    "sglang-kernel==0.4.4",
    "sglang-kernel==0.4.5",
    "sglang-kernel==0.4.6.post1",
    "sglang-kernel==0.4.7",
    "sglang-kernel==0.4.9",
    "sglang-kernel==0.4.10",
    "sgl-flash-mla==1.0.0",
]
TRITON = "triton==3.7.0"
ALL = [*(f"sglang=={v}" for v in SGLANG), *(f"flashinfer-python=={v}" for v in FLASHINFER), *KERNELS, TRITON]
_EXTRACT = {
    "sglang": extract_sglang.extract,
    "flashinfer-python": extract_flashinfer.extract,
    "sgl-kernel": extract_kernels.extract,
    "sglang-kernel": extract_kernels.extract,
    "sgl-flash-mla": extract_kernels.extract,
    "triton": extract_triton.extract,
}


def facts(tree: sources.Tree) -> dict[str, Any]:
    """The rules of one release, from a source tree of it."""
    return _EXTRACT[tree.package](tree)


def extract(package: str, release: str) -> dict[str, Any]:
    """The rules of one release, fetched: the same object that the committed file holds."""
    return msgspec.json.decode(msgspec.json.encode(facts(sources.fetch(package, release))))


def write(package: str, release: str) -> Path:
    """Extract one release and replace its file in rules/."""
    path = RULES / f"{package}-{release}.json"
    text = msgspec.json.format(msgspec.json.encode(extract(package, release)), indent=1)
    path.write_bytes(text + b"\n")
    return path


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ALL:
        print(write(*wanted.split("==")).name)
