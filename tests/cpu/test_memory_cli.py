"""`kvlab memory`, `kvlab model` and `kvlab gpus` on the command line."""

import json
import subprocess
import sys

import pytest

from kvlab import cli

GLM5 = ["memory", "--model", "glm-5", "--slots", "495552"]


@pytest.fixture
def run(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as done:
            cli.main([str(a) for a in args])
        out = capsys.readouterr()
        return done.value.code, out.out, out.err

    return run


@pytest.fixture
def answer(run):
    def answer(*args):
        code, out, err = run(*args, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return answer


def test_the_figures_of_the_source_text(answer):
    said = answer(*GLM5, "--active", 100)
    wanted = {
        "pool_bytes": 22264160256,
        "shadow_bytes": 44528320512,
        "one_layer_shadow_bytes": 570875904,
        "cast_traffic_bytes": 856313856,
        "active_bytes": 57600,
        "reduction": 4955.52,
        "indexer_bytes": 0,
        "sglang_logs_gb": 20.74,
        "fits": None,
    }
    assert {key: said[key] for key in wanted} == wanted
    assert all(type(said[key]) is int for key in wanted if key.endswith("_bytes"))


def test_with_the_indexer(answer):
    said = answer(*GLM5, "--active", 100, "--indexer")
    assert said["pool_bytes"] + said["indexer_bytes"] == said["pool_plus_indexer_bytes"] == 27366363648


def test_what_sglang_logs_for_glm_5_2(answer):
    args = ["memory", "--model", "glm-5.2", "--slots", 464768, "--page-size", 64, "--indexer"]
    assert answer(*args)["sglang_logs_gb"] == 23.91
    same_shape = ["memory", "--model", "glm-5", "--slots", 464768, "--page-size", 64, "--indexer"]
    assert answer(*same_shape)["sglang_logs_gb"] == 23.91


def test_fits_is_true_false_or_null(answer):
    args = [*GLM5, "--indexer", "--gpu", "rtx-pro-6000"]
    assert answer(*args)["fits"] is None
    assert answer(*args, "--weights", "61GiB")["fits"] is False
    assert answer(*args, "--weights", "20 GiB")["fits"] is True
    assert answer(*GLM5, "--weights", "61GiB")["fits"] is None
    said = answer(*args, "--weights", "61GiB")
    assert (said["fits_stock"], said["capacity_bytes"]) == (True, 97887 * 2**20)
    assert said["largest_pool_slots"] < 495552 < said["largest_pool_slots_stock"]


def test_the_table_shows_both_units_and_what_is_unknown(run):
    code, out, err = run(*GLM5, "--active", 100, "--indexer")
    assert (code, err) == (0, "")
    for shown in (
        "22.26 GB",
        "20.74 GiB",
        "44.53 GB",
        "41.47 GiB",
        "27.37 GB",
        "25.49 GiB",
        "4,955.52",
        "57.60 kB",
    ):
        assert shown in out, shown
    assert "KV size: 25.49 GB" in out
    assert "unknown without the weights" in out
    assert "unknown without the card" in out
    _, out, _ = run(*GLM5, "--indexer", "--gpu", "rtx-pro-6000", "--weights", "61GiB")
    assert "does not fit (127.96 > 95.59 GiB)" in out
    assert "unknown" not in out


def test_active_zero_has_no_reduction(answer):
    said = answer(*GLM5, "--active", 0)
    assert (said["active_bytes"], said["reduction"]) == (0, None)
    assert answer(*GLM5)["reduction"] is None


def test_huge_pools(answer, run):
    most = ["memory", "--model", "glm-5", "--slots", 10**100, "--weights", "1GiB", "--gpu", "h200"]
    assert answer(*most)["fits"] is False
    assert run(*most)[0] == 0
    assert answer("memory", "--model", "glm-5", "--slots", 10**40)["pool_bytes"] == 10**40 * 576 * 78


def test_as_a_process_it_prints_one_object_and_nothing_else():
    command = [sys.executable, "-m", "kvlab", *GLM5, "--active", "100", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["pool_bytes"] == 22264160256


@pytest.fixture
def files(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text('{"a": ')
    (tmp_path / "llama.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    return tmp_path


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--model", "{files}/missing.json", "--slots", "9"], "missing.json"),
        (["--model", "{files}/list.json", "--slots", "9"], "list.json"),
        (["--model", "{files}/broken.json", "--slots", "9"], "broken.json"),
        (["--model", "{files}/llama.json", "--slots", "9"], "LlamaForCausalLM"),
        (["--model", "glm5000", "--slots", "9"], "did you mean glm-5"),
        (["--model", "glm-5", "--slots", "0"], "--slots 0"),
        (["--model", "glm-5", "--slots", "-5"], "--slots -5"),
        (["--model", "glm-5", "--slots", "nan"], "--slots"),
        (["--model", "glm-5", "--slots", "1.5"], "--slots"),
        (["--model", "glm-5", "--slots", "9" * 5000], "--slots"),
        (["--model", "glm-5"], "--slots"),
        (["--model", "glm-5", "--slots", "9", "--active", "10"], "--active 10"),
        (["--model", "glm-5", "--slots", "9", "--active", "-1"], "--active -1"),
        (["--model", "glm-5", "--slots", "9", "--tp", "3"], "--tp 3"),
        (["--model", "glm-5", "--slots", "9", "--pp", "0"], "--pp 0"),
        (["--model", "glm-5", "--slots", "9", "--pp", "2", "--pp-partition", "a,b"], "--pp-partition"),
        (["--model", "glm-5", "--slots", "9", "--gpu", "rtx-pro-600"], "did you mean rtx-pro-6000"),
        (["--model", "glm-5", "--slots", "9", "--weights", "nan"], "--weights"),
        (["--model", "glm-5", "--slots", "9", "--weights", "-1GiB"], "--weights"),
        (["--model", "glm-5", "--slots", "9", "--weights", "61 furlongs"], "--weights"),
        (["--model", "glm-5", "--slots", "9", "--reserve", "inf"], "--reserve"),
        (["--model", "glm-5", "--slots", "9", "--reserve", "9" * 5000], "--reserve"),
        (["--model", "glm-5", "--slots", "9", "--weights", "9" * 400 + "TiB"], "--weights"),
        (["--model", "glm-5", "--slots", "9", "--weights", "9" * 32], "--weights"),
        (["--model", "glm-5", "--slots", "9", "--tp", "9" * 400], "--tp"),
        (["--model", "glm-5", "--slots", "9", "--dtype", "int8"], "--dtype"),
        (["--model", "deepseek-v3", "--slots", "9", "--indexer"], "--indexer"),
        (["--model", "glm-5", "--slots", "9", "--page-size", "-1"], "--page-size -1"),
        (["--model", "glm-5", "--slots", "9", "extra"], "extra"),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["table", "json"])
def test_bad_input_is_exit_2_and_one_line(run, files, args, names, as_json):
    before = sorted(files.rglob("*"))
    code, out, err = run("memory", *(a.replace("{files}", str(files)) for a in args), *as_json)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert names in err
    assert sorted(files.rglob("*")) == before


def test_model_show_names_sources_and_the_rank(answer, run):
    said = answer("model", "show", "glm-5", "--tp", 8, "--pp", 4)
    assert said["rank"]["heads"] == 8
    assert said["rank"]["pp_stages"] == [19, 19, 20, 20]
    assert "GlmMoeDsaConfig" in said["sources"]["kv_lora_rank"]
    code, out, _ = run("model", "show", "glm-5")
    assert code == 0
    assert "GlmMoeDsaConfig" in out


def test_model_list_and_gpus(answer, run):
    assert "kimi-k2" in answer("model", "list")["presets"]
    cards = answer("gpus")
    assert {card["key"]: card["memory"] for card in cards["gpus"]}["h200"] == 143771 * 2**20
    code, out, _ = run("gpus")
    assert code == 0
    assert "rtx-pro-6000" in out
