"""`kvlab bench … --recorded` with an option that narrows it: obeyed, or refused by what there is instead."""

import json

import pytest

from kvlab import cli
from kvlab.bench.recorded import newest
from kvlab.bench.serve_results import ServeRun
from kvlab.bench.step_results import StepRun


def kvlab(capsys, *args):
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", *args])
    return done.value.code, *capsys.readouterr()


def test_of_the_steps_those_that_are_all_of_it(capsys):
    """The control has a pool of its own, and is what the others are compared with."""
    run = newest("step.json", StepRun)[1]
    pool = max(r.pool for r in run.runs)
    chosen = (
        "--strategies",
        "exact,control_bf16",
        "--batches",
        "1,16",
        "--contexts",
        "8192",
        "--pools",
        str(pool),
    )
    code, out, err = kvlab(capsys, "step", "--recorded", "--json", "--backend", "flashinfer", *chosen)
    assert (code, err) == (0, "")
    shown = json.loads(out)
    asked = [
        r
        for r in run.runs
        if r.strategy in ("exact", "control_bf16")
        and r.batch in (1, 16)
        and (r.context, r.backend) == (8192, "flashinfer")
        and (r.pool == pool or r.strategy == "control_bf16")
    ]
    assert {r["strategy"] for r in shown["runs"]} == {"exact", "control_bf16"}
    assert sorted(r["step_ms"] for r in shown["runs"]) == sorted(r.step_ms for r in asked)
    for r in shown["runs"]:
        assert shown["processes"][r["process"]]["strategy"] == r["strategy"]


def test_of_the_servers_those_and_their_loads(capsys):
    run = newest("serve.json", ServeRun)[1]
    name = run.servers[-1].strategy
    code, out, _ = kvlab(
        capsys, "serve", "--recorded", "--json", "--strategies", name, "--concurrency", "1,16"
    )
    assert code == 0
    (shown,) = json.loads(out)["servers"]
    assert (shown["strategy"], [one["concurrency"] for one in shown["loads"]]) == (name, [1, 16])


def test_a_server_that_the_newest_run_lacks_is_shown_with_those_beside_it(capsys):
    code, out, _ = kvlab(capsys, "serve", "--recorded")
    assert code == 0
    tables = [part for part in out.split("glm-5, TP 8") if part]
    assert [
        [line.split()[1] for line in t.splitlines() if "│ " in line and line[2] != " "] for t in tables
    ] == [
        ["exact", "fast"],
        ["off", "exact"],
    ]
    code, out, _ = kvlab(capsys, "serve", "--recorded", "--json")
    shown = json.loads(out)
    assert [s["strategy"] for s in shown["servers"]] == ["exact", "fast", "off", "exact"]
    assert [s["provenance"] is None for s in shown["servers"]] == [True, True, False, False]
    assert shown["provenance"]["date"] > shown["servers"][-1]["provenance"]["date"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("step --batches 7", "--batches: 7 is not in the recorded run, which has 1, "),
        ("step --pools many", "--pools: expected whole numbers such as 1,16, got 'many'"),
        ("step --model glm-9", "--model: glm-9 is not in the recorded run, which has "),
        (
            "step --no-cuda-graphs",
            "--no-cuda-graphs: not in the recorded run, which has steps with",
        ),
        (
            "step --model deepseek-v3 --contexts 65536",
            "--recorded: no step of the recorded run is all of that",
        ),
        ("step --steps 9", "--steps: is for measuring, and --recorded shows a run that was made"),
        ("serve --strategies native", "--strategies: native is not in the recorded run, which has "),
        ("serve --input-tokens 3", "--input-tokens: 3 is not in the recorded run, which has "),
        ("serve --url http://x:1", "--url: is for measuring, and --recorded shows a run that was made"),
        ("cast --kv-dtype fp8_e5m2", "--kv-dtype: fp8_e5m2 is not in the recorded run, which has fp8_e4m3"),
        ("cast --sweep", "--sweep: is for measuring, and --recorded shows a run that was made"),
        ("trace --rounds 2", "--rounds: is for measuring, and --recorded shows a run that was made"),
    ],
)
def test_what_is_not_recorded_is_not_passed_over(args, says, capsys):
    name, *options = args.split()
    code, out, err = kvlab(capsys, name, "--recorded", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"kvlab: {says}")
