"""How does a running SGLang server come to write a trace? By its own endpoints, kept busy with requests."""

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvlab.errors import BadInput

# What shapes a decode step, of the hundreds of arguments a server reports.
_ARGS = (
    "version",
    "attention_backend",
    "decode_attention_backend",
    "kv_cache_dtype",
    "page_size",
    "max_total_num_tokens",
    "max_total_tokens",
    "max_running_requests",
    "tp_size",
    "dp_size",
    "pp_size",
    "disable_cuda_graph",
    "cuda_graph_max_bs",
    "quantization",
    "dtype",
    "load_format",
    "speculative_algorithm",
)
_PROMPT = "The cache holds one row for every token and layer. "


class Server(NamedTuple):
    """Where it answers, and the key that it was started with, if any."""

    url: str
    api_key: str | None

    def request(self, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(f"{self.url}/{path}", data=data, headers=headers)


def server_info(server: Server) -> dict[str, Any]:
    """What it says of itself, of `_ARGS`; nothing where it has no such endpoint. Raises BadInput where no
    server answers, or not with this key.
    """
    error: Exception | None = None
    for path in ("server_info", "get_server_info"):
        try:
            with urllib.request.urlopen(server.request(path), timeout=30) as reply:
                info = json.load(reply)
        except (OSError, ValueError) as e:
            error = e
            if isinstance(e, urllib.error.HTTPError):
                e.close()
                if e.code in (401, 403):
                    raise BadInput(_refused(server)) from None
            continue
        return {k: info[k] for k in _ARGS if isinstance(info, dict) and info.get(k) is not None}
    if isinstance(error, urllib.error.HTTPError):
        return {}
    raise BadInput(
        f"--url: no SGLang server answers at {server.url} ({_why(error)}); "
        "give its address, e.g. http://127.0.0.1:30000"
    )


def post(server: Server, path: str, body: dict[str, Any], timeout: float) -> bytes:
    """Its answer. Raises BadInput that names the address where there is none within `timeout` seconds."""
    url = f"{server.url}/{path}"
    try:
        with urllib.request.urlopen(server.request(path, body), timeout=timeout) as reply:
            return reply.read()
    except urllib.error.HTTPError as e:
        with e:
            text = e.read(500).decode("utf-8", "replace").strip()
        if e.code in (401, 403):
            raise BadInput(_refused(server)) from None
        raise BadInput(f"{url}: HTTP {e.code}: {text or e.reason}") from None
    except TimeoutError:
        raise BadInput(
            f"{url}: no answer in {timeout:.0f} s: the server replies when its steps are done, so it must "
            f"decode; give --requests or send traffic"
        ) from None
    except OSError as e:
        if isinstance(getattr(e, "reason", None), TimeoutError):
            raise BadInput(f"{url}: no answer in {timeout:.0f} s; give --requests or send traffic") from None
        raise BadInput(f"{url}: {_why(e)}") from None


def stop_profiler(server: Server) -> None:
    """Leave no profiler running in a server that others use."""
    try:
        post(server, "stop_profile", {}, 60)
    except BadInput as e:
        sys.stderr.write(f"kvlab: could not stop the profiler: {e}\n")


@contextmanager
def decoding(server: Server, requests: int, context: int, tokens: int, timeout: float) -> Iterator[None]:
    """Keep the server decoding: returns once every request has its first token."""
    started = threading.Semaphore(0)
    failed: list[Exception] = []

    def one(number: int) -> None:
        body = {
            # A number first, or the radix cache would share one prefill; about 1.2 tokens a word.
            "text": f"{number} " + _PROMPT * max(1, context // 12),
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
            "stream": True,
        }
        try:
            with urllib.request.urlopen(server.request("generate", body), timeout=timeout) as reply:
                reply.readline()
                started.release()
                while reply.read(65536):
                    pass
        except Exception as e:
            failed.append(e)
            started.release()

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(requests)]
    for t in threads:
        t.start()
    for _ in threads:
        if not started.acquire(timeout=timeout):
            raise BadInput(f"{server.url}/generate: no token in {timeout:.0f} s")
    if failed:
        raise BadInput(f"{server.url}/generate: {_why(failed[0])}")
    yield
    for t in threads:
        t.join(timeout)


def _refused(server: Server) -> str:
    if server.api_key is None:
        return f"--api-key: {server.url} asks for the key that it was started with; give it"
    return f"--api-key: {server.url} does not take this key; give the one that it was started with"


def _why(error: Exception | None) -> str:
    reason = getattr(error, "reason", None)
    return str(reason if reason is not None else error)
