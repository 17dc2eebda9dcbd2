"""The source files that the patch reads, of every SGLang release from 0.5.8 on and of flashinfer's MLA.

Wheels come through pip into .cache/wheels and stay there; the files go to .cache/release-
sources/<package>-<version>.
"""

import fnmatch
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent.parent / ".cache"
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
# Pinned by SGLang 0.5.9 and 0.5.15.post1, the measured host's, and the newest.
FLASHINFER = ["0.6.3", "0.6.12", "0.6.18.post1", "0.7.2"]
WANTED = {
    "sglang": ("sglang/srt/layers/attention/*_backend.py", "sglang/srt/mem_cache/memory_pool.py"),
    "flashinfer-python": ("flashinfer/mla.py", "flashinfer/mla/*.py"),
}


def fetch(package: str, version: str) -> Path:
    """The folder with the wanted files of one release."""
    folder = CACHE / "release-sources" / f"{package}-{version}"
    if (folder / ".done").is_file():
        return folder
    wheels = CACHE / "wheels"
    stem = package.replace("-", "_")
    if not any(wheels.glob(f"{stem}-{version}-*.whl")):
        pin = f"{package}=={version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), pin]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}")
    with zipfile.ZipFile(next(wheels.glob(f"{stem}-{version}-*.whl"))) as wheel:
        for name in wheel.namelist():
            if any(fnmatch.fnmatch(name, pattern) for pattern in WANTED[package]):
                wheel.extract(name, folder)
    (folder / ".done").touch()
    return folder


def main() -> int:
    wanted = [("sglang", v) for v in SGLANG] + [("flashinfer-python", v) for v in FLASHINFER]
    with ThreadPoolExecutor(4) as pool:
        for folder in pool.map(lambda w: fetch(*w), wanted):
            print(folder.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
