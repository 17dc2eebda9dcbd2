"""What the recorded servers must show: the README and the book say so of them."""

import json
import re

import pytest

from kvlab import data

FOLDER = data.recorded() / "h200-serve"
SECOND = data.recorded() / "h200-serve-2"
THIRD = data.recorded() / "h200-serve-3"
FIFTH = data.recorded() / "h200-serve-5"


def read(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def served(case):
    """A server that started, answered everything and left nothing behind."""
    return case["rc"] == 0 and not case["left"] and not case["hangs"] and case["answers"] == 13


def identical(found):
    assert found["answers"] >= 12
    return found["answers"] == found["same_tokens"] == found["same_logprobs"]


@pytest.mark.parametrize(
    "path",
    sorted(p for folder in (FOLDER, SECOND, THIRD, FIFTH) for p in folder.glob("*.json")),
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_every_file_says_where_it_ran(path):
    text = path.read_text(encoding="utf-8")
    where = json.loads(text)["provenance"]
    assert not re.search(r"/(tmp|root|work)/", text)
    assert set(where["gpus"]) == {"NVIDIA H200"}
    assert where["versions"]["sglang"] == "0.5.15.post1"
    assert len(where["commit"]) == 40


def test_the_installed_plugin_patches_and_repeats_stock_to_the_bit():
    cases = read("plugin.json")["cases"]
    for name in ("off", "off_again", "installed", "excluded", "applied_before", "gather", "fast", "altered"):
        assert served(cases[name]), name
        # The control: another prompt token gives another answer, and answers are not all alike.
        assert cases[name]["a_prompt_token_matters"]
        assert cases[name]["distinct_tokens"] > 100
        assert cases[name]["kvlab_is_installed"]
    for name in ("off_again", "installed", "excluded", "applied_before", "gather", "altered"):
        assert identical(cases[name]["against_off"]), name
    assert cases["installed"]["mixed"] == {"requests": 96, "complete": 96, "same_as_off": 96}
    for name, strategy in {"installed": "shadow", "applied_before": "shadow", "gather": "gather"}.items():
        (rank,) = cases[name]["ranks"]
        for kind in ("decode", "extend"):
            site = f"flashinfer_mla.{kind}"
            assert rank["sites"][site] == "patched"
            assert set(rank["counters"]["calls"][site]) == {strategy}
        assert rank["counters"]["fallbacks"] == {}
        assert rank["counters"]["bytes_avoided"] > 10**11
    assert cases["fast"]["ranks"][0]["chosen"]["flashinfer_mla.decode"]["strategy"] == "fused"


def test_one_line_in_the_log_and_none_where_kvlab_is_left_out():
    cases = read("plugin.json")["cases"]
    (line,) = cases["installed"]["lines"]
    assert "kvlab: SGLang 0.5.15.post1, flashinfer_mla, exact: decode shadow, extend shadow" in line
    for name in ("off", "off_again", "excluded"):
        assert cases[name]["lines"] == []
        assert cases[name]["ranks"] == []


def test_strict_and_mistyped_refuse_in_one_line():
    cases = read("plugin.json")["cases"]
    for name, said in {"altered_strict": "not served unpatched", "mistyped": "is not a strategy"}.items():
        assert cases[name]["rc"] == 1
        assert cases[name]["left"] == cases[name]["tracebacks"] == 0
        (line,) = cases[name]["lines"]
        assert said in line
    assert len(cases["altered"]["lines"]) == 2
    assert all("left alone" in line for line in cases["altered"]["lines"])


@pytest.mark.parametrize(
    ("name", "case", "against", "ranks"),
    [
        ("nextn.json", "nextn", "nextn_off", 1),
        ("nextn.json", "nextn_fast", "nextn_off", 1),
    ],
)
def test_ranks_and_drafts_repeat_stock_too(name, case, against, ranks):
    cases = read(name)["cases"]
    assert served(cases[case])
    assert served(cases[against])
    assert identical(cases[case][f"against_{against}"])
    assert len(cases[case]["ranks"]) == ranks
    assert cases[against]["ranks"] == []
    chosen = [rank["chosen"] for rank in cases[case]["ranks"]]
    assert all(c == chosen[0] for c in chosen)
    for rank in cases[case]["ranks"]:
        assert rank["sites"]["flashinfer_mla.decode"] == rank["sites"]["flashinfer_mla.extend"] == "patched"
        assert rank["counters"]["fallbacks"] == {}


def test_verify_and_status_over_http():
    servers = fifth("http.json")["servers"]
    assert servers["off"]["verify"]["rc"] == 0
    for name, strategy in {"installed": "exact", "kvlab_serve": "exact", "uninstalled": None}.items():
        assert servers[name]["verify"]["rc"] == 0
        found = json.loads(servers[name]["verify"]["out"])
        assert found["identical"]
        assert found["prompts"] == 4
        assert found["strategy_after"] == strategy
        assert (servers[name]["status"]["rc"] == 0) is (strategy is not None)
        assert servers[name]["end"]["left"] == 0
    again = json.loads(servers["off"]["verify_again"]["out"])
    assert again["identical"]
    status = json.loads(servers["installed"]["status"]["out"])
    assert status["strategy"] == "exact"
    assert status["counters"]["bytes_avoided"] > 0
    assert "runs unpatched" in servers["uninstalled"]["status"]["err"]


def test_without_graphs_and_too_small_a_pool():
    cases = read("faults-first-run.json")["cases"]
    assert served(cases["no_graphs"])
    assert identical(cases["no_graphs"]["against_off"])
    small = cases["strict_small_pool"]
    assert (small["rc"], small["left"]) == (1, 0)
    assert "KVLAB_PATCH_STRICT" in small["lines"][0]


def third(name):
    return json.loads((THIRD / name).read_text(encoding="utf-8"))


def fifth(name):
    return json.loads((FIFTH / name).read_text(encoding="utf-8"))


def second(name):
    return json.loads((SECOND / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", ["tp2", "pp2", "dp2"])
def test_two_gpus_with_the_plan_guard_repeat_stock_to_the_bit(case):
    cases = second("two.json")["cases"]
    for name in (case, f"{case}_off"):
        assert served(cases[name])
        assert cases[name]["a_prompt_token_matters"]
        assert cases[name]["distinct_tokens"] > 100
        # All of a crowd come; fifteen asked alone have the unpatched server's tokens.
        assert cases[name]["crowd"]["complete"] == cases[name]["crowd"]["requests"] == 15
    assert identical(cases[case][f"against_{case}_off"])
    assert cases[case]["crowd"]["alone_as_off"] == 15
    assert cases[f"{case}_off"]["ranks"] == []
    ranks = cases[case]["ranks"]
    assert len(ranks) == 2
    assert all(r["chosen"] == ranks[0]["chosen"] and r["counters"]["fallbacks"] == {} for r in ranks)
    if case == "pp2":
        assert [r["server"]["pp_rank"] for r in ranks] == [0, 1]


def test_all_layers_over_http_under_load():
    import msgspec

    from kvlab.bench.serve_results import ServeRun

    run = msgspec.convert(second("serve.json"), ServeRun)
    assert "78 layers" in run.model
    assert "495552" in run.server_args
    off, exact = (next(s for s in run.servers if s.strategy == name) for name in ("off", "exact"))
    assert exact.same_tokens
    (line,) = exact.log_lines
    assert (
        "exact: decode shadow, extend shadow; a decode step no longer casts 495,553 slots x 78 layers" in line
    )
    assert off.log_lines == []
    assert off.patch is None
    assert exact.patch["counters"]["fallbacks"] == {}
    for a, b in zip(off.loads, exact.loads, strict=True):
        assert a.concurrency == b.concurrency
        assert a.completed == a.requests
        assert b.completed == b.requests
        assert b.output_tokens_per_s > 2 * a.output_tokens_per_s
    assert off.loads[0].tpot_ms_median > 6 * exact.loads[0].tpot_ms_median


def test_fast_beside_exact_under_load_serves_every_request_and_falls_back_nowhere():
    import msgspec

    from kvlab.bench.serve_results import ServeRun

    run = msgspec.convert(fifth("serve.json"), ServeRun)
    before = msgspec.convert(second("serve.json"), ServeRun)
    assert (run.model, run.server_args) == (before.model, before.server_args)
    assert [s.strategy for s in run.servers] == ["exact", "fast"]
    operator = fifth("operator.json")["servers"]
    for server, decode in zip(run.servers, ("shadow", "fused"), strict=True):
        assert server.error is None
        (line,) = server.log_lines
        assert f"{server.strategy}: decode {decode}, extend shadow; a decode step no longer casts" in line
        assert "495,553 slots x 78 layers" in line
        assert server.patch["counters"]["fallbacks"] == {}
        assert set(server.patch["counters"]["calls"]["flashinfer_mla.decode"]) == {decode}
        assert [load.concurrency for load in server.loads] == [1, 16, 64]
        assert all(load.completed == load.requests for load in server.loads)
        typed = operator[server.strategy]
        assert typed["verify"]["rc"] == typed["status"]["rc"] == 0
        assert json.loads(typed["status"]["out"])["counters"]["fallbacks"] == {}
    exact, fast = run.servers
    assert sum(load.completed for load in fast.loads) == 164
    for a, b in zip(exact.loads, fast.loads, strict=True):
        assert b.tpot_ms_median < a.tpot_ms_median
    assert json.loads(operator["fast"]["verify"]["out"])["strategy_before"] == "exact"


def test_an_operator_s_commands_at_the_loaded_servers():
    servers = second("operator.json")["servers"]
    assert servers["off"]["verify"]["rc"] == 0
    assert servers["off"]["status"]["rc"] == 2
    assert "runs unpatched" in servers["off"]["status"]["err"]
    found = json.loads(servers["exact"]["verify"]["out"])
    assert found["identical"]
    assert found["strategy_after"] == "exact"
    assert "patched with shadow" in servers["exact"]["status_words"]["out"]
    status = json.loads(servers["exact"]["status"]["out"])
    assert status["counters"]["bytes_avoided"] > 10**13
    assert status["counters"]["fallbacks"] == {}


def test_the_patch_s_own_plan_waits():
    found = second("plan-race.json")
    assert found["ahead_differs"] == found["ahead_is_the_next_plans"] == found["steps"] - 1
    assert found["guarded_differs"] == found["patched_differs"] == 0


@pytest.mark.parametrize("name", ["off_again", "installed", "excluded", "argument", "strict", "altered"])
def test_the_plugin_with_the_plan_guard_repeats_stock_to_the_bit(name):
    cases = second("plugin.json")["cases"]
    assert served(cases[name])
    assert cases[name]["a_prompt_token_matters"]
    assert cases[name]["distinct_tokens"] > 100
    assert cases[name]["kvlab_is_installed"]
    assert identical(cases[name]["against_off"])
    assert cases[name]["crowd"]["complete"] == cases[name]["crowd"]["alone_as_off"] == 15
    patched = {"installed": "exact", "argument": "exact", "strict": "exact"}.get(name)
    if patched is None:
        assert all(set(r["sites"].values()) != {"patched"} for r in cases[name]["ranks"])
        return
    (rank,) = cases[name]["ranks"]
    assert rank["strategy"] == patched
    assert rank["counters"]["fallbacks"] == {}
    # One line in the log, whatever the plugin was told beside the argument.
    (line,) = cases[name]["lines"]
    assert "exact: decode shadow, extend shadow" in line


@pytest.mark.parametrize("name", ["fa3", "fa3_pages"])
def test_fa3_servers_repeat_stock_to_the_bit(name):
    cases = second("plugin.json")["cases"]
    assert served(cases[name])
    assert served(cases[f"{name}_off"])
    assert cases[name]["a_prompt_token_matters"]
    assert identical(cases[name][f"against_{name}_off"])
    (rank,) = cases[name]["ranks"]
    assert set(rank["counters"]["calls"]["fa3.decode"]) == {"shadow"}
    assert rank["counters"]["fallbacks"] == {}


def test_strict_and_mistyped_refuse_in_one_line_again():
    cases = second("plugin.json")["cases"]
    for name, said in {"altered_strict": "not served unpatched", "mistyped": "is not a strategy"}.items():
        assert (cases[name]["rc"], cases[name]["left"], cases[name]["tracebacks"]) == (1, 0, 0)
        (line,) = cases[name]["lines"]
        assert said in line


LINES = {
    "fault_serving": "shadow failed (RuntimeError: injected: kernel raises while serving)",
    "fault_capture": "shadow failed (RuntimeError: injected: kernel raises in capture)",
    "fault_removed": "removed from this scheduler; captured graphs stay patched",
    "fault_another": "removed from this scheduler; captured graphs stay patched",
    "fault_compile": "self-check of shadow, gather, the one-launch KV write failed on cuda:0: RuntimeError",
    "fault_eager": "shadow failed (RuntimeError: injected: kernel raises while serving)",
    "fault_again": "shadow failed (RuntimeError: injected: a repeated launch raises while serving)",
    "fault_half": "left to stock: the patch failed to go in",
    "fault_self_check": "self-check of shadow failed",
    "fault_wrong_bit": "values differ from the stock cast; not used",
    "fault_scratch": "shadow failed (OutOfMemoryError",
    "fault_joint": "self-check of KV write and cast in one launch failed",
}


@pytest.mark.parametrize("case", LINES)
def test_faults_lose_no_request_change_no_token_and_say_one_line(case):
    found = fifth("faults.json")["cases"][case]
    assert served(found)
    assert found["a_prompt_token_matters"]
    assert found["crowd"]["complete"] == 15
    alike = found.get("against_no_graphs_off", found["against_off"])
    assert identical(alike)
    assert found["together_as_unpatched"] == {"answers": 30, "same_tokens": 30}
    assert found["tracebacks"] == found["ranks_after_shutdown"] == 0
    # One line beside the one of the start, which tells how each kind of call is served.
    lines = [line.partition("kvlab: ")[2] for line in found["lines"]]
    assert len(lines) == len(set(lines))
    more = [line for line in lines if ", exact: decode " not in line and line]
    assert LINES[case] in more[0]
    # The scratch fails twice: for the wide layer, and for the compact one in its place.
    assert len(more) == (2 if case == "fault_scratch" else 1)


def test_what_broke_is_left_to_stock():
    faults = fifth("faults.json")["cases"]
    (rank,) = faults["fault_removed"]["ranks"]
    assert (rank["strategy"], rank["note"]) == ("off", "captured graphs stay patched")
    (rank,) = faults["fault_compile"]["ranks"]
    assert {c["strategy"] for c in rank["chosen"].values()} == {"stock"}
    # Graphs that were captured after the fault are stock's.
    (rank,) = faults["fault_capture"]["ranks"]
    assert rank["counters"]["fallbacks"]["shadow failed"] > 0
    (rank,) = faults["fault_another"]["ranks"]
    assert rank["strategy"] == "gather"
    assert rank["note"] == "graphs captured before stay with exact"
    assert rank["counters"]["calls"]["flashinfer_mla.extend"]["gather"] > 0


def test_fast_without_nvrtc_says_so_in_a_line():
    found = fifth("faults.json")["cases"]["fault_nvrtc"]
    assert served(found)
    assert sum("CUDA kernels for this chip do not compile" in line for line in found["lines"]) == 1


@pytest.mark.parametrize("name", ["installed", "excluded", "strict", "no_graphs"])
def test_the_last_tree_repeats_stock_to_the_bit(name):
    cases = fifth("faults.json")["cases"]
    assert served(cases[name])
    assert cases[name]["a_prompt_token_matters"]
    assert identical(cases[name]["against_no_graphs_off" if name == "no_graphs" else "against_off"])
    together = cases[name]["together_as_unpatched"]
    assert together["answers"] == together["same_tokens"] == (126 if name == "installed" else 30)
    assert len(cases[name]["lines"]) == (name != "excluded")
    for rank in cases[name]["ranks"]:
        assert rank["counters"]["fallbacks"] == {}
    if name == "installed":
        assert cases[name]["mixed"] == {"requests": 96, "complete": 96, "same_as_off": 96}


def test_strict_and_mistyped_refuse_in_one_line_on_the_last_tree():
    cases = fifth("faults.json")["cases"]
    for name, said in {"altered_strict": "not served unpatched", "mistyped": "is not a strategy"}.items():
        assert (cases[name]["rc"], cases[name]["left"], cases[name]["tracebacks"]) == (1, 0, 0)
        (line,) = cases[name]["lines"]
        assert said in line


def test_two_gpus_on_the_last_tree_repeat_stock_to_the_bit():
    cases = fifth("two.json")["cases"]
    for case in cases.values():
        assert served(case)
        assert case["a_prompt_token_matters"]
        assert case["crowd"]["complete"] == 15
        assert case["ranks_after_shutdown"] == 0
    assert identical(cases["tp2"]["against_tp2_off"])
    assert cases["tp2"]["together_as_unpatched"] == {"answers": 30, "same_tokens": 30}
    assert cases["tp2_off"]["ranks"] == cases["tp2_off"]["lines"] == []
    ranks = cases["tp2"]["ranks"]
    assert [r["server"]["tp_rank"] for r in ranks] == [0, 1]
    # A line a rank.
    assert len(cases["tp2"]["lines"]) == 2
    assert all(r["chosen"] == ranks[0]["chosen"] and r["counters"]["fallbacks"] == {} for r in ranks)


def test_what_serves_is_of_one_tree():
    """The README says so of these."""
    (commit,) = {
        json.loads(p.read_text(encoding="utf-8"))["provenance"]["commit"] for p in FIFTH.glob("*.json")
    }
    assert f"commit {commit[:7]}" in (FIFTH / "README.md").read_text(encoding="utf-8")


def test_busy_servers_give_one_of_two_answers_and_only_unpatched_ones_a_third():
    cases = third("busy.json")["cases"]
    assert all(served(c) and c["crowd"]["complete"] == 15 for c in cases.values())
    rounds = {name: c["rounds"] for name, c in cases.items()}
    # The controls: quiet servers repeat themselves, and the two kinds answer most prompts otherwise.
    for name in ("quiet", "quiet_in_turn"):
        assert rounds[name]["prompts_that_repeat"] == rounds[name]["prompts"] == 15
        assert rounds[name]["as_neither"] == 0
    assert rounds["quiet"]["prompts_where_the_quiet_ones_part"] == 12
    for name in ("busy", "busy_again"):
        assert rounds[name]["as_neither"] == 0
        assert rounds[name]["as_in_turn"] > 5
        # At the first decode step, never later.
        assert rounds[name]["part_at"] == {"1": rounds[name]["as_in_turn"]}
    for name in ("busy_off", "busy_off_again"):
        assert rounds[name]["as_neither"] > 5
    for name in ("busy_in_turn", "busy_off_in_turn"):
        assert rounds[name]["prompts_that_repeat"] == 15
        assert identical(cases[name]["against_quiet_in_turn"])
        assert rounds[name]["as_neither"] == 0


def test_a_pool_without_room_for_a_wide_layer_is_served_all_the_same():
    found = second("no-room.json")["cases"]["no_room"]
    assert served(found)
    assert identical(found["against_off"])
    (rank,) = found["ranks"]
    assert {c["strategy"] for c in rank["chosen"].values()} == {"gather"}
    # The line is cut to its end.
    assert (
        sum(
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 34.33 GiB" in line
            for line in found["lines"]
        )
        == 1
    )
