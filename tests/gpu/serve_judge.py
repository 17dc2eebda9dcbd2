"""What do the answers of prove_serve.py's engines show, each held against those that it must repeat?"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_cases import CASES, CROWD

ANSWERS = ("first", "again", "longer", "changed", "last")


def judged(outs: Sequence[Path]) -> None:
    """What the cases in these folders show, one object: judged.json in the first, and printed."""
    said: dict[str, dict[str, Any]] = {}
    ends: dict[str, dict[str, Any]] = {}
    logs: dict[str, str] = {}
    for out in outs:
        for path in sorted(out.glob("*.end.json")):
            name = path.name.removesuffix(".end.json")
            ends[name] = json.loads(path.read_text())
            logs[name] = (out / f"{name}.log").read_text(errors="replace")
            if (out / f"{name}.json").exists():
                said[name] = json.loads((out / f"{name}.json").read_text())
    verdicts = {name: verdict(name, said, ends[name], logs[name]) for name in ends}
    where = json.loads((outs[0] / "provenance.json").read_text())
    text = without_paths(json.dumps({"provenance": where, "cases": verdicts}, indent=1))
    (outs[0] / "judged.json").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


def without_paths(text: str) -> str:
    """Files by their names: where a machine keeps them is nobody's business."""
    return re.sub(r"/(?:tmp|root|usr|home|opt|work|var)/(?:[^\s/'\",:;)]+/)*", "", text)


def verdict(name: str, said: dict[str, Any], end: dict[str, Any], log: str) -> dict[str, Any]:
    lines = [line for line in log.splitlines() if "kvlab: " in line or "kvlab.patch" in line]
    found: dict[str, Any] = {k: end[k] for k in ("rc", "seconds", "hangs", "left")} | {
        "lines": [line[-400:] for line in dict.fromkeys(lines)][:12],
        "tracebacks": log.count("Traceback (most recent call last)"),
    }
    mine = said.get(name)
    if mine is None or "last" not in mine:
        found["tail"] = log.splitlines()[-12:]
        return found
    found |= {
        "kvlab_is_installed": mine["kvlab_is_installed"],
        "seconds_to_start": mine["seconds_to_start"],
        "ranks": [rank(r) for r in mine.get("running", [])],
        "ranks_at_start": len(mine["started"]),
        "ranks_after_shutdown": len(mine.get("running_after_shutdown", [])),
        "cached_tokens": [a["cached"] for a in mine["again"]],
        "a_prompt_token_matters": answers(mine, "changed") != [mine["first"][3]["tokens"]],
        "distinct_tokens": len({t for a in answers(mine, "first") for t in a}),
        "answers": sum(len(answers(mine, a)) for a in ANSWERS),
    }
    for other in (CASES[name].against, "off"):
        if other and other in said and "last" in said[other] and other != name:
            found[f"against_{other}"] = alike(mine, said[other])
    unpatched = said.get(CASES[name].against, {})
    if "at_once" in mine:
        once, again = mine["at_once"]
        found["crowd"] = {
            "requests": len(once),
            "complete": sum(len(a) == 32 for a in once),
            "as_again": sum(map(list.__eq__, once, again)),
        }
    if CASES[name].shows:
        found["mode"] = mode(name, said)
    elif "at_once" in mine and "at_once" in unpatched:
        found["together_as_unpatched"] = together(mine, unpatched)
    if mine.get("rounds"):
        found["rounds"] = repeats(mine, said)
    if "mixed" in mine:
        theirs = unpatched.get("mixed")
        found["mixed"] = {
            "requests": len(mine["mixed"]),
            "complete": sum(len(a) == 16 + 3 * (n % 16) for n, a in enumerate(mine["mixed"])),
            "same_as_off": theirs and sum(a == b for a, b in zip(mine["mixed"], theirs, strict=True)),
        }
    return found


def mode(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """Was the mode on, and, of the answers to questions that came together, how many are the unpatched
    server's? `unpatched_repeats`: how many of those a second unpatched server repeats, where there is one.
    """
    case, mine = CASES[name], said[name]
    counted: Counter[str] = Counter()
    for process in mine.get("witness", []):
        counted.update(process["counts"])
    streams = [process["streams"] for process in mine.get("witness", []) if process["streams"]]
    found: dict[str, Any] = {
        "is_on": all(counted[what] > 0 for what in case.shows),
        "counted": dict(sorted(counted.items())),
        "streams": streams,
        "then": mine.get("then"),
    }
    if case.against in said and "last" in said[case.against]:
        found["together_as_unpatched"] = together(mine, said[case.against])
        if case.repeats in said and "last" in said[case.repeats]:
            unpatched, again = said[case.against], said[case.repeats]
            found["unpatched_repeats"] = together(unpatched, again) | {"alone": alike(unpatched, again)}
    return found


def together(a: dict[str, Any], b: dict[str, Any]) -> dict[str, int]:
    """Of the answers to questions that came together, to both: all, and those with the same tokens."""
    loads = [*zip(a["at_once"], b["at_once"], strict=True)]
    if "mixed" in a and "mixed" in b:
        loads.append((a["mixed"], b["mixed"]))
    pairs = [pair for once, other in loads for pair in zip(once, other, strict=True)]
    return {"answers": len(pairs), "same_tokens": sum(x == y for x, y in pairs)}


def repeats(mine: dict[str, Any], said: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Answers from a cached prefix, each held against the quiet servers' to the bit.

    `as_quiet` those of the server that overlaps, `as_in_turn` those of the other one where they are not the
    same, `as_neither` the rest. `part_at`: how many part from the quiet server's at which logprob.
    """
    cached = mine["rounds"][1:]
    found: dict[str, Any] = {
        "answers": sum(map(len, cached)),
        "prompts": len(CROWD),
        "prompts_that_repeat": sum(
            len({json.dumps(bits_of(a)) for a in each}) == 1 for each in zip(*cached, strict=True)
        ),
    }
    if not {"quiet", "quiet_in_turn"} <= said.keys():
        return found
    quiet, in_turn = ([bits_of(a) for a in said[name]["rounds"][-1]] for name in ("quiet", "quiet_in_turn"))
    kinds: Counter[str] = Counter()
    part_at: Counter[int] = Counter()
    for each in cached:
        for a, one, other in zip(map(bits_of, each), quiet, in_turn, strict=True):
            kinds["as_quiet" if a == one else "as_in_turn" if a == other else "as_neither"] += 1
            if a != one:
                part_at[
                    next((n for n, (x, y) in enumerate(zip(a[1], one[1], strict=True)) if x != y), -1)
                ] += 1
    return found | {
        **{kind: kinds[kind] for kind in ("as_quiet", "as_in_turn", "as_neither")},
        "part_at": dict(sorted(part_at.items())),
        "prompts_where_the_quiet_ones_part": sum(a != b for a, b in zip(quiet, in_turn, strict=True)),
    }


def bits_of(a: dict[str, Any]) -> tuple[list[int], list[float]]:
    return a["tokens"], a["logprobs"]


def answers(mine: dict[str, Any], part: str) -> list[list[int]]:
    its = mine[part]
    return [a["tokens"] for a in (its if isinstance(its, list) else [its])]


def alike(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of all answers: those with the same tokens, and with the same logprobs to the bit.

    The last answer's prefix in the radix cache is another where a mixed load came before.
    """
    pairs = []
    for part in ANSWERS if ("mixed" in a) == ("mixed" in b) else ANSWERS[:-1]:
        ours, theirs = ([x[part]] if isinstance(x[part], dict) else x[part] for x in (a, b))
        pairs += zip(ours, theirs, strict=True)
    return {
        "answers": len(pairs),
        "same_tokens": sum(x["tokens"] == y["tokens"] for x, y in pairs),
        "same_logprobs": sum(x["logprobs"] == y["logprobs"] for x, y in pairs),
    }


def rank(r: dict[str, Any]) -> dict[str, Any]:
    return {
        "server": r["server"],
        "strategy": r["strategy"],
        "sites": {s["site"]: s["state"] for s in r["sites"]},
        "left": {s["site"]: s["reason"] for s in r["sites"] if s["reason"]},
        "chosen": r["chosen"],
        "counters": r["counters"],
        "scratch_bytes": r["scratch_bytes"],
        "note": r["note"],
    }
