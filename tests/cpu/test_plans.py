"""Released plan and run, as recorded: each demonstration is wrong where it must be, ours right."""

from kvlab import plans
from kvlab.backends import rules, sources

SEEN = plans.recorded()


def test_run_reads_the_slots_again_and_no_lengths():
    read = {f.kept.name: f.is_read for f in SEEN.frozen}
    assert read["_kv_indices_buf"]
    assert not any(read[n] for n in ("_qo_indptr_buf", "_kv_indptr_buf", "_kv_len_arr_buf"))
    # Every release that kvlab has rules for; those that keep a planned backend swap there too.
    assert [r.release for r in SEEN.releases] == rules.releases("flashinfer-python")
    for r in SEEN.releases:
        assert ("_kv_indices_buf" in r.reads) != ("_planned_backend" in r.reads), r.release


def test_failing_first_the_wrapper_s_lengths_are_stale_at_replay():
    fresh = {b.name: b.is_fresh for b in SEEN.buffers}
    assert fresh == {
        "wrapper._kv_indptr_buf": False,
        "wrapper._kv_len_arr_buf": False,
        "wrapper._kv_indices_buf": True,
        "backend.kv_indptr": True,
        "the plan's schedule": True,
    }
    by = {(r.lengths, r.aliased): r for r in SEEN.readings}
    naive, ours = by["the wrapper's", False], by["the backend's", False]
    assert naive.cast_rows < naive.read_rows
    assert not naive.is_same
    assert naive.error > 0.1
    assert ours.cast_rows == ours.read_rows
    assert ours.is_same
    # One alias hides it.
    assert by["the wrapper's", True].is_same


def test_failing_first_a_compact_buffer_in_request_order_outgrows_the_pool():
    by = {s.name: s for s in SEEN.shared}
    assert by["replan"].rows == by["replan"].requests * by["replan"].prefix > 10 * by["replan"].pool_slots
    for name in ("gather", "shadow"):
        assert by[name].rows <= by[name].pool_slots
        assert by[name].cast == by[name].prefix
    assert all(s.is_same for s in SEEN.shared)


def test_run_refuses_no_buffer_that_its_indices_do_not_fit():
    assert SEEN.careless.raised == ""
    assert SEEN.careless.largest_index >= SEEN.careless.compact_rows
    assert SEEN.careless.past_the_end > 0


def test_a_machine_without_the_sources_shows_the_recording(monkeypatch):
    monkeypatch.setattr(sources, "at_hand", lambda package, release: None)
    assert plans.shown() == ("data/recorded/plan-and-run/observed.json", SEEN)
