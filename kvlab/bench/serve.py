"""What does the patch do for a server under load? SGLang's own server and load generator, once a strategy.

The servers are loaded one after another on the same GPUs. Each is started as an operator starts it, with
nothing but KVLAB_PATCH between them, asked by `kvlab patch verify` for the tokens that the others must
repeat, and then loaded at each concurrency. Several may start together: a server without requests leaves the
GPU alone.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvlab.bench.gpu_memory import gpu_peak
from kvlab.bench.serve_requests import Asked, Loader, loader
from kvlab.bench.serve_results import Served, ServeRun, write
from kvlab.bench.serve_server import (
    CONTROL,
    Server,
    all_ready,
    end,
    last_error,
    launched,
    server_for,
    value_of,
    without,
)
from kvlab.errors import BadInput
from kvlab.patch import policy, verify
from kvlab.provenance import Provenance, collect

__all__ = ["CONTROL", "STRATEGIES", "Asked", "Server", "measure", "measure_url"]

STRATEGIES = (*policy.CHOICES, CONTROL)


def measure(
    model: Path,
    strategies: Sequence[str],
    asked: Asked,
    *,
    server_args: Sequence[str] = (),
    python: str = sys.executable,
    port: int | None = None,
    together: int = 1,
    apart: float = 20.0,
    out: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    then: Callable[[Server], None] = lambda _: None,
) -> ServeRun:
    """Start, verify, load and stop a server for each strategy; writes `out` after each.

    A folder with a config.json and no weights is served with seeded dummy weights. `together`: so many
    servers start side by side, and each is loaded while the others of its group have nothing to do; they
    share the GPUs' memory, so that no peak is any one's. They start `apart` seconds from each other: what one
    compiled and tuned is there for the next, as for a server that restarts. `then` is called with each server
    that was loaded, while it still runs. A server that does not come up has its `error`, and the next is
    loaded. A key among `server_args` is taken and not kept. Raises BadInput for what no server could be
    started with.
    """
    unknown = [s for s in strategies if s not in STRATEGIES]
    if unknown or not strategies:
        raise BadInput(f"--strategies: {', '.join(unknown) or 'none given'}; use {', '.join(STRATEGIES)}")
    if not (model / "config.json").is_file():
        raise BadInput(f"--model-path: {model} has no config.json; name a model's folder")
    is_seeded = not any(model.glob("*.safetensors"))
    asked = replace(asked, api_key=asked.api_key or value_of(server_args, "--api-key"))
    run = ServeRun(
        provenance=_where(asked.api_key),
        model=_named(model),
        server_args=without(server_args, "--api-key"),
        seeded_dummy_weights=is_seeded,
        servers=[],
    )
    with tempfile.TemporaryDirectory(prefix="kvlab-serve-") as folder, loader(python, asked.api_key) as load:
        for at in range(0, len(strategies), together):
            group = [
                server_for(model, strategy, server_args, python, port and port + n, Path(folder), is_seeded)
                for n, strategy in enumerate(strategies[at : at + together])
            ]
            say(f"{', '.join(server.strategy for server in group)}: starting")
            with contextlib.ExitStack() as live:
                up = []
                for n, server in enumerate(group):
                    time.sleep(apart if n else 0)
                    up.append(live.enter_context(launched(server)))
                ready = all_ready(up, asked.ready_seconds)
                for server, process, seconds in zip(group, up, ready, strict=True):
                    first = next((s for s in run.servers if s.tokens), None)
                    served = _one(server, seconds, asked, load, first, say, then, is_alone=together == 1)
                    run = msgspec.structs.replace(run, servers=[*run.servers, served])
                    if out is not None:
                        write(out, run)
                    # Its memory is free for the next group, and it is not there for the next load.
                    end(process)
    return run


def measure_url(
    url: str,
    asked: Asked,
    *,
    model: str | None = None,
    python: str = sys.executable,
    say: Callable[[str], None] = lambda _: None,
) -> ServeRun:
    """Load the server that runs at `url`. `model`: its tokenizer; None asks the server."""
    verify.port_of(url)
    url = url.rstrip("/")
    info = verify.info_of(url, asked.api_key)
    if info is None:
        raise BadInput(f"--url: {url} does not answer as an SGLang server; start it or correct the address")
    path = model or info.get("model_path")
    with tempfile.TemporaryDirectory(prefix="kvlab-serve-") as folder, loader(python, asked.api_key) as load:
        served = _loaded(Served(strategy="running"), url, path, asked, load, None, Path(folder), say)
    return ServeRun(
        provenance=_where(asked.api_key),
        model=Path(path).name if path else url,
        server_args=[],
        seeded_dummy_weights=False,
        servers=[served],
    )


def _one(
    server: Server,
    ready: float | None,
    asked: Asked,
    load: Loader,
    first: Served | None,
    say: Callable[[str], None],
    then: Callable[[Server], None],
    *,
    is_alone: bool,
) -> Served:
    served = Served(strategy=server.strategy)
    change = msgspec.structs.replace
    with gpu_peak() as peak:
        if ready is None:
            served = change(served, error=f"did not come up: {last_error(server.log)}")
        else:
            say(f"{server.strategy}: ready after {ready:.0f} s")
            served = change(served, ready_s=ready)
            served = _loaded(served, server.url, str(server.model), asked, load, first, server.work, say)
            then(server)
        if is_alone:
            served = change(served, gpu_peak_bytes=peak())
        else:
            # What a server tells of its memory is what left the GPU meanwhile, the others' too.
            kept = {k: v for k, v in served.memory.items() if k == "token_capacity"}
            served = change(served, memory=kept)
    lines = server.log.read_text(errors="replace").splitlines()
    served = change(served, log_lines=[line for line in lines if "kvlab: " in line])
    if served.error:
        say(f"{server.strategy}: {served.error}")
    return served


def _loaded(
    served: Served,
    url: str,
    model: str | None,
    asked: Asked,
    load: Loader,
    first: Served | None,
    work: Path,
    say: Callable[[str], None],
) -> Served:
    change = msgspec.structs.replace
    try:
        checked = verify.measure(url, asked.verify_tokens, asked.api_key)
        served = change(served, step_ms=checked["step_ms"], tokens=checked["tokens"])
        if first is not None:
            served = change(served, same_tokens=checked["tokens"] == first.tokens)
        for concurrency in asked.concurrencies:
            one = load.run(url, model, asked, concurrency, work / f"{concurrency}.jsonl")
            say(
                f"{served.strategy}: {concurrency} at once, {one.output_tokens_per_s:,.0f} tokens/s, "
                f"{one.tpot_ms_median:.2f} ms a token"
            )
            served = change(served, loads=[*served.loads, one])
    except BadInput as e:
        served = change(served, error=str(e))
    state = ((verify.info_of(url, asked.api_key) or {}).get("internal_states") or [{}])[0]
    patch = _patch_of(url, work, asked.api_key)
    return change(served, memory=state.get("memory_usage") or {}, patch=patch)


def _patch_of(url: str, work: Path, api_key: str | None) -> dict[str, Any] | None:
    """What the server's first scheduler says in its run file, without what names this host."""
    before = os.environ.get("KVLAB_RUN_DIR")
    # Run files are written every few seconds at most.
    if (work / "run").is_dir():
        os.environ["KVLAB_RUN_DIR"] = str(work / "run")
        time.sleep(2.5)
        with contextlib.suppress(BadInput):
            verify.measure(url, 1, api_key)
    try:
        found = verify.local_status(url)
    finally:
        if before is None:
            os.environ.pop("KVLAB_RUN_DIR", None)
        else:
            os.environ["KVLAB_RUN_DIR"] = before
    return found and {k: v for k, v in found.items() if k not in ("pid", "started", "server")}


def _where(api_key: str | None) -> Provenance:
    """Provenance, the key left out of the command."""
    found = collect(env=["CUDA_VISIBLE_DEVICES"])
    if not api_key:
        return found
    return msgspec.structs.replace(found, command=found.command.replace(api_key, "KEY"))


def _named(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers")
    return (config.get("kvlab_rank_of") and f"{config['kvlab_rank_of']}, {layers} layers") or model.name
