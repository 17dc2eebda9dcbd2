"""`kvlab patch`: what the patch does here or in a running server, whether that server still answers alike."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab import __version__
from kvlab.errors import BadInput

_URL = typer.Option(help="A server on this host, e.g. http://127.0.0.1:30000.")
_JSON = typer.Option("--json", help="One JSON object and nothing else.")


def register(app: typer.Typer) -> None:
    """Add `patch status`, `patch diff` and `patch verify`."""
    patch = typer.Typer(
        help="The production patch: its state, its check, the way upstream.", no_args_is_help=True
    )
    patch.command("status")(status)
    patch.command("diff")(diff)
    patch.command("verify")(verify)
    app.add_typer(patch, name="patch")


def status(
    url: Annotated[str | None, _URL] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """What would be patched here, or with --url what is patched in a running server and what it has done.

    A running server is asked through the files that its scheduler processes write under $KVLAB_RUN_DIR.
    """
    if url is None:
        from kvlab.patch.api import status as here
        from kvlab.patch.planned import planned
        from kvlab.patch.sites import installed

        _print({**here(), "planned": planned(installed())}, as_json, _plan)
        return
    from kvlab.patch.runfiles import elsewhere, run_dirs, running
    from kvlab.patch.verify import is_here, listens, port_of

    port = port_of(url)
    if not is_here(url):
        raise BadInput(f"--url: {url} is not on this host, and its status files are where it is; ask there")
    processes = running(port)
    if not processes:
        places = " or ".join(map(str, run_dirs()))
        why = (
            "it runs unpatched, in another container, as another user, or with another KVLAB_RUN_DIR"
            if listens(url)
            else "nothing listens there, start the server or correct the port"
        )
        raise BadInput(
            f"--url: no patched scheduler of {url} has written to {places}; {'; '.join([why, *elsewhere()])}"
        )
    _print(merged(processes), as_json, _words)
    removed = [str(p["pid"]) for p in processes if p["strategy"] == "off"]
    if removed:
        raise BadInput(
            f"--url: {url} runs unpatched: remove() was called in scheduler {', '.join(removed)}; restart it"
        )


def diff() -> None:
    """The smallest source change that an SGLang maintainer would make, for the installed release."""
    from kvlab.patch.diff import unified
    from kvlab.patch.sites import installed

    typer.echo(unified(installed()), nl=False)


def verify(
    url: Annotated[str, _URL],
    save: Annotated[Path | None, typer.Option(help="Write what was measured, for --against later.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with what --save wrote before.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 32,
    api_key: Annotated[
        str | None, typer.Option(help="The key that the server was started with.", envvar="KVLAB_API_KEY")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Ask a live server for greedy tokens and its step time; with --against, compare. Exit code 1: tokens
    differ.
    """
    from kvlab import outputs
    from kvlab.patch import verify as check

    before = check.load(against) if against is not None else None
    outputs.check("--save", save)
    measured = check.measure(url, new_tokens, api_key)
    if save is not None:
        check.save(save, measured)
    if before is None:
        _print(measured, as_json, lambda m: f"{m['step_ms']:.2f} ms a step, {len(m['tokens'])} prompts")
        return
    found = check.compare(before, measured)
    _print(found, as_json, _verdict)
    if not found["identical"]:
        raise typer.Exit(1)


def merged(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """One status of all the server's processes: counters summed, sites as the first says, and each rank.

    Raises BadInput where a server of another kvlab says other things of itself.
    """
    import msgspec

    try:
        msgspec.convert(processes, list[_process()])
        return _merged(processes)
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError):
        named = (p.get("kvlab", "an earlier version") for p in processes)
        theirs = ", ".join(sorted({" ".join(str(name).split())[:40] for name in named}))
        raise BadInput(
            f"--url: that server was started with kvlab {theirs}, this is {__version__}, which does not "
            "understand its status; restart the server or ask with its version"
        ) from None


def _process() -> Any:
    """What a scheduler says of itself, as far as it is read here."""
    import msgspec

    counts = dict[str, int]
    choice = msgspec.defstruct("Choice", [("strategy", str), ("reason", str)])
    site = msgspec.defstruct("Site", [("site", str), ("state", str), ("reason", str)])
    fields = [("calls", dict[str, counts]), ("fallbacks", counts), ("bytes_avoided", int)]
    counters = msgspec.defstruct("Counters", [*fields, ("kv_writes", counts, {})])
    return msgspec.defstruct(
        "Process",
        [
            *(("pid", int), ("server", dict[str, int | str]), ("sglang", str | None), ("sites", list[site])),
            *(("strategy", str), ("counters", counters), ("chosen", dict[str, choice])),
            *(("scratch_bytes", int), ("note", str)),
        ],
    )


def _merged(processes: list[dict[str, Any]]) -> dict[str, Any]:
    first = processes[0]
    calls: dict[str, Counter[str]] = {}
    fallbacks: Counter[str] = Counter()
    writes: Counter[str] = Counter()
    for p in processes:
        for site, its in p["counters"]["calls"].items():
            calls.setdefault(site, Counter()).update(its)
        fallbacks.update(p["counters"]["fallbacks"])
        writes.update(p["counters"].get("kv_writes", {}))
    # An Engine has a port that it does not listen on: the default one, unless it is told.
    places = Counter(tuple(p["server"].get(n) for n in ("dp_rank", "pp_rank", "tp_rank")) for p in processes)
    servers = max(places.values())
    note = (
        f"{servers} servers or Engines have that port: this is all of them" if servers > 1 else first["note"]
    )
    of_rank = ("strategy", "chosen", "scratch_bytes", "note")
    return {
        **{k: first[k] for k in ("sglang", "sites", "strategy", "chosen")},
        "note": note,
        "counters": {
            "calls": calls,
            "fallbacks": fallbacks,
            "bytes_avoided": sum(p["counters"]["bytes_avoided"] for p in processes),
            "kv_writes": writes,
        },
        "ranks": [{"pid": p["pid"], **p["server"], **{k: p[k] for k in of_rank}} for p in processes],
    }


def _print(found: dict[str, Any], as_json: bool, words: Any) -> None:
    typer.echo(json.dumps(found) if as_json else words(found))


def _plan(found: dict[str, Any]) -> str:
    """Before a restart: what a server started here would do, and what of SGLang is known."""
    plan = found["planned"]
    why = f" ({plan['reason']})" if plan["reason"] else ""
    release = f"SGLang {found['sglang']}" if found["sglang"] else "SGLang"
    start = {
        "plugin": "a server started here takes",
        "kvlab serve": "a server started with `python -m kvlab serve` takes",
    }
    does = "a server started here stays unpatched"
    if plan["strategy"] != "off":
        does = f"{start[plan['by']]} {plan['strategy']}" if plan["by"] else "no server starts here"
    lines = [f"{release}: {does}{why}", *(f"  {wrong}" for wrong in plan["misspelt"])]
    for site in found["sites"]:
        left = f" ({site['reason']})" if site["state"] == "left alone" else ""
        lines.append(f"  {site['site']}: {site['state']}{left}")
    return "\n".join(lines)


def _words(found: dict[str, Any]) -> str:
    lines = [f"SGLang {found['sglang'] or 'not installed'}, strategy {found['strategy']}"]
    for site in found["sites"]:
        chosen = found["chosen"].get(site["site"])
        how = f" with {chosen['strategy']}" if chosen else ""
        why = f" ({site['reason']})" if site["reason"] else ""
        lines.append(f"  {site['site']}: {site['state']}{how}{why}")
    counters = found["counters"]
    for site, its in counters["calls"].items():
        lines.append(f"  {site}: " + ", ".join(f"{n:,} calls {s}" for s, n in its.items()))
    lines += [f"  fell back {n:,} times: {reason}" for reason, n in counters["fallbacks"].items()]
    if counters["bytes_avoided"]:
        lines.append(f"  {counters['bytes_avoided'] / 1e9:,.1f} GB of casts avoided")
    if found["note"]:
        lines.append(f"  {found['note']}")
    ranks = found.get("ranks", [])
    for rank in ranks[1:]:
        # They are asked to be alike; one that is not says so.
        if (rank["strategy"], rank["chosen"]) != (ranks[0]["strategy"], ranks[0]["chosen"]):
            how = ", ".join(f"{site} {c['strategy']}" for site, c in rank["chosen"].items())
            lines.append(f"  unlike the first, scheduler {rank['pid']}: {rank['strategy']}; {how}")
    return "\n".join(lines)


def _verdict(found: dict[str, Any]) -> str:
    tokens = (
        "identical tokens" if found["identical"] else f"tokens differ, first at {found['first_difference']}"
    )
    steps = (
        f"{found[f'step_ms_{when}']:.2f} ms a step {when} ({found[f'strategy_{when}'] or 'no patch seen'})"
        for when in ("before", "after")
    )
    return "; ".join(
        filter(None, [f"{tokens} on {found['prompts']} prompts", ", ".join(steps), found["note"]])
    )
