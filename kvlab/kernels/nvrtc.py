"""How does a CUDA C++ kernel get onto a serving host without nvcc? Through NVRTC, which torch's wheels bring.

Kernels are package data in `cuda/`. `build` compiles one to a cubin, kept on disk under
$KVLAB_CACHE (else $XDG_CACHE_HOME/kvlab, else ~/.cache/kvlab); `load` puts it on a device, once a process.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent / "cuda"

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CompileError(RuntimeError):
    """NVRTC refused a kernel, or no NVRTC was found."""


@dataclass(frozen=True)
class Source:
    """One specialisation: a file of `cuda/`, the extern "C" kernel in it, its macros and the chip."""

    file: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()
    arch: str = "sm_90a"

    def options(self) -> list[str]:
        macros = [f"-D{name}={value}" for name, value in self.defines]
        return [f"--gpu-architecture={self.arch}", "-std=c++17", "-lineinfo", "--ptxas-options=-v", *macros]


@cache
def library() -> Any:
    """libnvrtc, of torch's CUDA where several are installed. Raises CompileError where there is none."""
    tried = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as e:
            tried.append(str(e))
    raise CompileError(f"no libnvrtc: install nvidia-cuda-nvrtc ({'; '.join(tried) or 'nothing found'})")


def _candidates() -> list[str]:
    try:
        import torch

        major = (torch.version.cuda or "").partition(".")[0]
    except ImportError:
        major = ""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [str(p) for f in folders for p in sorted(f.glob("*/lib/libnvrtc.so.*")) if "alt" not in p.name]
    found += [f"libnvrtc.so.{n}" for n in (major, "13", "12") if n]
    return sorted(found, key=lambda p: not (major and p.endswith(f".so.{major}")))


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_source(source: Source) -> tuple[bytes, str]:
    """The cubin and the compiler's log (registers, spills). Raises CompileError with that log."""
    nvrtc = library()
    program = ctypes.c_void_p()
    headers = sorted(SOURCES.glob("*.cuh"))
    texts = (ctypes.c_char_p * len(headers))(*[h.read_bytes() for h in headers])
    names = (ctypes.c_char_p * len(headers))(*[h.name.encode() for h in headers])
    text = (SOURCES / source.file).read_bytes()
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text, source.file.encode(), len(headers), texts, names
    )
    if status:
        raise CompileError(f"{source.file}: nvrtcCreateProgram returned {status}")
    try:
        options = [o.encode() for o in source.options()]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        raw = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = raw.decode(errors="replace").rstrip("\0")
        if status:
            raise CompileError(f"{source.file}: NVRTC {'.'.join(map(str, version()))} says: {log.strip()}")
        return _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(size_of: Any, fill: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    fill(program, buffer)
    return buffer.raw


def cache_dir() -> Path:
    if chosen := os.environ.get("KVLAB_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlab"


def build(source: Source) -> bytes:
    """The cubin, from disk where this very text was compiled before with this very compiler."""
    digest = hashlib.sha256(repr((source, source.options(), version())).encode())
    for file in [SOURCES / source.file, *sorted(SOURCES.glob("*.cuh"))]:
        digest.update(file.read_bytes())
    kept = cache_dir() / f"{source.entry}-{digest.hexdigest()[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        cubin, _ = compile_source(source)
    with contextlib.suppress(OSError):  # a read-only home costs a compilation a process
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as part:
            part.write(cubin)
        os.replace(part.name, kept)  # another process sees the whole file or none
    return cubin


@dataclass
class Kernel:
    """A kernel on one device."""

    function: ctypes.c_void_p
    module: ctypes.c_void_p
    shared: int = 0  # the most dynamic shared memory asked for so far, bytes

    def allow(self, shared: int) -> None:
        """Let a block have this much dynamic shared memory, bytes."""
        if shared > self.shared:
            _check(
                "cuFuncSetAttribute", driver().cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, shared)
            )
            self.shared = shared

    def max_clusters(self, cluster: int, threads: int, shared: int) -> int:
        """How many clusters of that many blocks the device holds at once; not every GPC is filled."""
        self.allow(shared)
        attribute = _ClusterAttribute(id=_CLUSTER_DIMENSION, dims=(cluster, 1, 1))
        config = _LaunchConfig(
            grid=(cluster, 1, 1),
            block=(threads, 1, 1),
            shared=shared,
            attributes=ctypes.addressof(attribute),
            num_attributes=1,
        )
        found = ctypes.c_int()
        status = driver().cuOccupancyMaxActiveClusters(
            ctypes.byref(found), self.function, ctypes.byref(config)
        )
        _check("cuOccupancyMaxActiveClusters", status)
        return found.value

    def launch(self, grid: int, threads: int, shared: int, stream: int, params: ctypes.Structure) -> None:
        """Launch on a CUDA stream handle; `params` is the kernel's one argument, by value."""
        self.allow(shared)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        status = driver().cuLaunchKernel(
            self.function, grid, 1, 1, threads, 1, 1, shared, ctypes.c_void_p(stream), arguments, None
        )
        _check("cuLaunchKernel", status)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _ClusterAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, as CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("dims", ctypes.c_uint * 3),
        ("rest", ctypes.c_byte * 52),
    )


_loaded: dict[tuple[Source, int], Kernel] = {}


def load(source: Source, device: int) -> Kernel:
    """Compile if need be and load onto CUDA device `device`, whose context torch has made current."""
    if found := _loaded.get((source, device)):
        return found
    cubin = build(source)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with _RelaxedCapture():
        _check("cuModuleLoadData", driver().cuModuleLoadData(ctypes.byref(module), cubin))
        status = driver().cuModuleGetFunction(ctypes.byref(function), module, source.entry.encode())
        _check("cuModuleGetFunction", status)
    return _loaded.setdefault((source, device), Kernel(function, module))


class _RelaxedCapture:
    """Loading a module is no stream work, but a capture in global mode forbids it; lift that for a moment."""

    def __enter__(self) -> None:
        self.mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(self.mode))

    def __exit__(self, *_: object) -> None:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(self.mode))


@cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(what: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {status}, {(text.value or b'unknown').decode()}")


def defines(values: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((k, int(v)) for k, v in values.items())
