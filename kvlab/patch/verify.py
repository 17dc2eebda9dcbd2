"""Does a live server answer as it did before? Greedy tokens of fixed prompts and the time a decode step
takes.

Prompts go one after another, so that the batch composition is the same in both runs: servers batch by timing,
and another batch is another rounding.
"""

import contextlib
import http.client
import json
import socket
import statistics
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvlab import outputs
from kvlab.errors import BadInput
from kvlab.patch.saying import one_line

_TIMEOUT = 600
# What a server's answer may hold, and ranks that it may have, before it is none of SGLang's.
_MOST_BYTES, _MOST_RANKS = 1 << 26, 4096
_NUMBERS = ("step_ms", "new_tokens")
# Token ids, not text: no tokenizer decides. Small ids exist in every vocabulary.
_LENGTHS = (7, 33, 130, 515)


def prompts() -> list[list[int]]:
    """Fixed prompts of different lengths."""
    return [[100 + (n * 31 + i * 17) % 900 for i in range(n)] for n in _LENGTHS]


def measure(url: str, new_tokens: int = 32, api_key: str | None = None) -> dict[str, Any]:
    """`{url, tokens: [[id…]…], step_ms, new_tokens, patch}` of the server at `url`.

    Each prompt is sent three times, to a server of several data-parallel ranks once more for each further
    one: they take turns, and each has a radix cache of its own. The last two find it there and must agree.
    The last one's time, less that of a single token asked before it, is what its other tokens took: the step
    is their mean, and the prefill, the way there and back are left out. Raises BadInput where answers do not
    agree, where no SGLang server answers, or not to this `api_key`.
    """
    port_of(url)
    base = url.rstrip("/")
    tokens, steps = [], []
    ranks = _dp_size(base, api_key)
    for ids in prompts():
        # The first answer attends to the prompt's own wide rows, later ones to the cache's FP8 rows.
        for _ in range(ranks):
            _generate(base, ids, new_tokens, api_key)
        first = _generate(base, ids, new_tokens, api_key)
        _, single = _timed(base, ids, 1, api_key)
        again, whole = _timed(base, ids, new_tokens, api_key)
        steps.append((whole - single) * 1e3 / max(new_tokens - 1, 1))
        tokens.append(again)
        if first != again:
            raise BadInput(
                f"--url: {base} gives other greedy tokens each time for the same prompt; verify needs a "
                "server that repeats itself (no other load on it or its GPU, deterministic kernels)"
            )
    return {
        "url": base,
        "new_tokens": new_tokens,
        "tokens": tokens,
        "step_ms": statistics.median(steps),
        "patch": local_status(base),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """`{identical, prompts, first_difference, step_ms_before, step_ms_after, speedup, strategy_before,
    strategy_after, note}`.

    `first_difference` is (prompt, position) or None; `speedup` None where the step is too short to be timed;
    a strategy None where no patched server was seen on this host. `note`: what to know before the patch is
    praised or blamed.
    """
    pairs = list(zip(before["tokens"], after["tokens"], strict=False))
    differs = None
    if len(before["tokens"]) != len(after["tokens"]) or before["new_tokens"] != after["new_tokens"]:
        raise BadInput(
            "--against: that file was made with other prompts or another --new-tokens; measure again"
        )
    for number, (a, b) in enumerate(pairs):
        if a != b:
            where = next(
                (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
            )
            differs = (number, where)
            break
    served = [(m.get("patch") or {}).get("strategy") for m in (before, after)]
    note = ""
    if served[0] == served[1]:
        note = f"{served[0] or 'no patched server'} both times: this says nothing of the patch"
    elif differs is not None:
        # On a busy GPU an overlapping SGLang has two right answers (data/recorded/h200-serve-3).
        note = "ask again with nothing else on its GPUs: on busy ones unpatched servers differ too"
    return {
        "identical": differs is None,
        "prompts": len(pairs),
        "first_difference": differs,
        "step_ms_before": before["step_ms"],
        "step_ms_after": after["step_ms"],
        "speedup": before["step_ms"] / after["step_ms"] if after["step_ms"] > 0 else None,
        "strategy_before": served[0],
        "strategy_after": served[1],
        "note": note,
    }


def load(path: Path) -> dict[str, Any]:
    """A saved measurement; raises BadInput naming the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror or e}; save one with patch verify --url … --save FILE") from None
    except ValueError:
        raise BadInput(f"{path}: not JSON; save one with patch verify --url … --save FILE") from None
    if not isinstance(found, dict) or not _is_measured(found):
        raise BadInput(f"{path}: not a measurement of patch verify; save one with --save FILE")
    return found


def _is_measured(found: dict[str, Any]) -> bool:
    tokens = found.get("tokens")
    return (
        isinstance(tokens, list)
        and all(isinstance(t, list) for t in tokens)
        and all(isinstance(n := found.get(name), int | float) and abs(n) < 1e9 for name in _NUMBERS)
        and isinstance(found.get("patch"), dict | None)
    )


def save(path: Path, measured: dict[str, Any]) -> None:
    """Write whole or not at all."""
    outputs.write("--save", path, json.dumps(measured, indent=1) + "\n")


def local_status(url: str) -> dict[str, Any] | None:
    """What the server's processes say of the patch, where they run on this host."""
    from kvlab.patch.runfiles import running

    port = port_of(url)
    found = running(port) if is_here(url) else []
    return found[0] if found else None


def listens(url: str) -> bool:
    """Does anything take connections at that address?"""
    try:
        with socket.create_connection((urlsplit(url).hostname, port_of(url)), timeout=5):
            return True
    except OSError:
        return False


def is_here(url: str) -> bool:
    """Is that a name or address of this host? One that can be bound is."""
    try:
        addresses = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return False
    for family, kind, _, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as one:
            one.bind(address)
            return True
    return False


def port_of(url: str) -> int:
    """The port in a server's address; raises BadInput for what is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = None, None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"--url: {url!r} is no server address; write it as http://127.0.0.1:30000")
    return port or (443 if parts.scheme == "https" else 80)


def _timed(base: str, ids: list[int], new_tokens: int, api_key: str | None) -> tuple[list[int], float]:
    start = time.perf_counter()
    found = _generate(base, ids, new_tokens, api_key)
    return found, time.perf_counter() - start


def _dp_size(base: str, api_key: str | None) -> int:
    """Data-parallel ranks of the server as it says itself; 1 where it does not say."""
    size = (info_of(base, api_key) or {}).get("dp_size")
    return size if type(size) is int and 0 < size <= _MOST_RANKS else 1


def info_of(url: str, api_key: str | None = None) -> dict[str, Any] | None:
    """The server's description of itself; the endpoint's older name is tried too."""
    for name in ("server_info", "get_server_info"):
        with contextlib.suppress(OSError, ValueError):
            found = answer_of(request(f"{url}/{name}", api_key), 30)
            if isinstance(found, dict):
                return found
    return None


def request(url: str, api_key: str | None, body: dict[str, Any] | None = None) -> urllib.request.Request:
    """A request to a server, a POST where it has a `body`."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return urllib.request.Request(
        url, data=None if body is None else json.dumps(body).encode(), headers=headers
    )


def _generate(base: str, ids: list[int], new_tokens: int, api_key: str | None) -> list[int]:
    asked = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    answer = _post(f"{base}/generate", asked, api_key)
    found = answer.get("output_ids") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(type(t) is int for t in found):
        raise BadInput(f"--url: {base}/generate answered without output_ids; it must be an SGLang server")
    if len(found) != new_tokens:
        # A server that gives up on every request would be identical to itself.
        raise BadInput(
            f"--url: {base}/generate answered {len(found)} tokens, asked for {new_tokens}; see its log"
        )
    return found


def _post(url: str, body: dict[str, Any], api_key: str | None) -> Any:
    try:
        return answer_of(request(url, api_key, body), _TIMEOUT)
    except urllib.error.HTTPError as e:
        e.close()
        if e.code in (401, 403):
            wrong = "asks for the key that it was started with" if api_key is None else "takes another key"
            raise BadInput(f"--api-key: {url} {wrong}; give that one") from None
        raise BadInput(
            f"--url: {url} answered {e.code}; it must be an SGLang server with /generate"
        ) from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "reason", e)
        raise BadInput(
            f"--url: {url} does not answer ({reason}); start the server or correct the address"
        ) from None


def opened(asked: urllib.request.Request, seconds: float) -> Any:
    """The response to a request, open. `seconds`: the longest silence. Raises as urllib's `urlopen`."""
    # A proxy that the environment names knows nothing of this host's ports.
    handlers = [urllib.request.ProxyHandler({})] if is_here(asked.full_url) else []
    return urllib.request.build_opener(*handlers).open(asked, timeout=seconds)


def answer_of(asked: urllib.request.Request, seconds: float) -> Any:
    """The JSON that a server answers. Raises OSError or ValueError where it is none, too long or too late."""
    end, text = time.monotonic() + seconds, bytearray()
    try:
        with opened(asked, seconds) as answer:
            while part := answer.read1(1 << 16):
                text += part
                if len(text) > _MOST_BYTES:
                    raise ValueError(f"more than {_MOST_BYTES >> 20} MiB of an answer")
                if time.monotonic() > end:
                    raise TimeoutError(f"no whole answer in {seconds} s")
            if answer.length:
                raise ValueError(f"{answer.length} bytes of the answer are missing")
        return json.loads(text)
    except http.client.HTTPException as e:
        raise ValueError(f"it speaks no HTTP: {one_line(e)}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
