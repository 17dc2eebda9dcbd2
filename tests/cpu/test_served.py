"""An answer and a run agree only for the right reason; recorded runs are shown beside the answer."""

import json

import pytest

from kvlab.backends import decide, question, reproduce, rules, served
from kvlab.errors import BadInput

TRACEBACK = """
Traceback (most recent call last):
  File "/x/sglang/srt/mem_cache/memory_pool.py", line 1778, in __init__
    assert self.page_size == 64
AssertionError
"""


def answer(backend, model="glm-5", gpu="rtx-pro-6000", release="0.5.9"):
    return next(v for v in decide(question(model, gpu, release)) if v.backend == backend)


def judge(verdict, code, log):
    return served.judge(verdict, model="glm-5", gpu="NVIDIA X", kv_dtype="fp8_e4m3", code=code, log=log)


def test_a_refusal_agrees_when_the_log_quotes_it():
    found = judge(answer("cutlass_mla"), 1, TRACEBACK)
    assert (found.served, found.agrees, found.exception) == (False, True, "AssertionError")
    assert found.quoted == "assert self.page_size == 64"
    log = "ValueError: Expected qk_nope_head_dim == 128, got 192\n"
    found = judge(answer("trtllm_mla"), 1, log)
    assert found.agrees
    assert found.exception == "ValueError: Expected qk_nope_head_dim == 128, got 192"


@pytest.mark.parametrize(
    ("backend", "code", "log"),
    [
        ("cutlass_mla", 0, "Decode. latency"),
        ("cutlass_mla", 1, "torch.OutOfMemoryError: CUDA out of memory"),
        ("trtllm_mla", 1, TRACEBACK),
        ("flashinfer", 1, "RuntimeError: no kernel image"),
        ("flashinfer", 124, "TimeoutError: nothing after 300 s"),
    ],
)
def test_another_outcome_or_another_reason_does_not_agree(backend, code, log):
    assert not judge(answer(backend), code, log).agrees


def test_the_failures_are_shown_as_recorded_where_no_release_is_at_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    origin, raised = reproduce.shown()
    assert origin == "data/recorded/backend-failures/raised.json"
    assert [r.name for r in raised[:3]] == ["trtllm_mla", "trtllm_mla block_num", "cutlass_mla"]
    assert raised[0].says == "Expected qk_nope_head_dim == 128, got 192"
    assert raised[2].quote == "assert self.page_size == 64"
    for r in raised:
        # What was raised is what the rules quote for that release.
        assert rules.load(r.package, r.release).release == r.release


def test_a_served_batch_agrees_with_works():
    found = judge(answer("flashinfer"), 0, "Decode. median latency: 0.01 s")
    assert (found.served, found.agrees, found.exception) == (True, True, "")


def test_recorded_runs_stand_beside_the_answer(tmp_path, monkeypatch):
    verdict = answer("flashinfer", "deepseek-v3", "h200", "0.5.15.post1")
    assert verdict.served == [] or verdict.served[0]["served"]
    outcome = served.judge(
        verdict, model="deepseek-v3", gpu="NVIDIA H200", kv_dtype="fp8_e4m3", code=0, log="Decode."
    )
    folder = tmp_path / "recorded" / "run"
    folder.mkdir(parents=True)
    fields = {f: getattr(outcome, f) for f in outcome.__struct_fields__}
    (folder / "served.json").write_text(json.dumps({"provenance": {}, "outcomes": [fields]}))
    monkeypatch.setattr("kvlab.data.root", lambda: tmp_path)
    served.recorded.cache_clear()
    try:
        shown = answer("flashinfer", "deepseek-v3", "h200", "0.5.15.post1").served
        assert shown == [
            {
                "source": "data/recorded/run/served.json",
                "model": "deepseek-v3",
                "served": True,
                "agrees": True,
                "exception": "",
            }
        ]
        assert answer("flashinfer", "deepseek-v3", "b200", "0.5.15.post1").served == []
    finally:
        served.recorded.cache_clear()


def test_records_of_several_runs_become_one(tmp_path):
    def document(name, date, *outcomes):
        path = tmp_path / name
        path.write_text(json.dumps({"provenance": {"date": date}, "outcomes": list(outcomes)}))
        return path

    def outcome(backend, served, gpu="NVIDIA H200"):
        return {"model": "glm-5", "backend": backend, "sglang": "0.5.9", "gpu": gpu, "served": served}

    late = document("b.json", "2026-11-29T22:10", outcome("fa3", True))
    early = document("a.json", "2026-11-29T22:00", outcome("fa3", False), outcome("triton", True))
    joined = served.merge([late, early])
    assert [(o["backend"], o["served"]) for o in joined["outcomes"]] == [("fa3", True), ("triton", True)]
    assert [r["date"][-5:] for r in joined["runs"]] == ["22:00", "22:10"]
    other = document("c.json", "2026-11-29T22:20", outcome("fa3", True, "NVIDIA B200"))
    with pytest.raises(BadInput, match="NVIDIA B200"):
        served.merge([late, other])


def test_the_card_did_what_the_answer_says():
    tried = [o for _, o in served.recorded() if o.gpu == "NVIDIA H200"]
    assert {o.model for o in tried} == {"glm-5", "deepseek-v3"}
    for o in tried:
        assert o.agrees, (o.model, o.backend, o.exception)
        assert o.served or o.quoted
        now = next(v for v in decide(question(o.model, "h200", o.sglang, tp=8)) if v.backend == o.backend)
        if o.backend != "dsa":  # a dummy rank has no indexer, GLM-5 has
            assert now.works == o.expected == o.served, (o.model, o.backend)
    # What the answers call for is complete: every dense backend of the release, for both ranks.
    for model in ("glm-5", "deepseek-v3"):
        asked = [v for v in decide(question(model, "h200", "0.5.15.post1")) if "." not in v.backend]
        expected = {v.backend for v in asked if not v.reason.startswith("serves ")}
        assert {o.backend for o in tried if o.model == model} == expected
        served_ = {o.backend for o in tried if o.model == model and o.served}
        assert served_ == {"flashinfer", "fa3", "flashmla", "triton"}


def test_of_two_runs_of_a_backend_the_newer_stands():
    sources = {source for source, _ in served.recorded()}
    assert sources == {"data/recorded/h200-served-2/served.json"}
