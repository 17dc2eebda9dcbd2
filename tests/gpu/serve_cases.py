"""Which servers does prove_serve.py start, and what are they asked?"""

from dataclasses import dataclass, field, replace
from typing import Any

from serve_modes import MODES

LENGTHS = (7, 33, 130, 515, 1500)
POOL = 65_536


@dataclass(frozen=True)
class Case:
    """`env` and `args` beside the common ones. `against`: whose tokens it must repeat."""

    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    against: str = ""
    new_tokens: int = 48
    applies: str = ""
    """The strategy of a `kvlab.patch.apply()` before the Engine."""
    mixed: bool = False
    rounds: int = 0
    """So often each prompt of the crowd is asked alone; from the second time on its prefix is cached."""
    shares: bool = False
    """Answers while others on the same GPU start and answer."""
    trigger: bool = False
    """The fault begins after the first requests."""
    altered: bool = False
    """SGLang's source is not what kvlab knows."""
    then: str = ""
    """What happens after the first answers: "evict", "update" or "release"."""
    model: str = ""
    """The rank whose folder's name ends so."""
    holds: bool = False
    """Requests that come together wait for each other, so that every server batches them alike."""
    shows: tuple[str, ...] = ()
    """What serve_witness.py must have counted for the mode to have been on."""
    repeats: str = ""
    """The server whose answers tell whether the unpatched one repeats itself."""


OFF = {"KVLAB_PATCH": "off"}
NO_PLUGIN = {"SGLANG_PLUGINS": "kvlab_test"}
TP2 = {
    "tp_size": 2,
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}
DP2 = {**TP2, "dp_size": 2, "enable_dp_attention": True}
PP2 = {"pp_size": 2}
FA3 = {"attention_backend": "fa3"}
FA3_P64 = {**FA3, "page_size": 64}
NEXTN = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
# Each result is taken before the next batch starts.
IN_TURN = {"disable_overlap_schedule": True}
NO_ROOM = {"max_total_tokens": 32_000_000, "mem_fraction_static": 0.9}
DEEP = {"load_format": "dummy", "max_total_tokens": 495_552}


def _fault(name: str, *, strategy: str = "", trigger: bool = False, **args: Any) -> Case:
    env = {"KVLAB_TEST_FAULT": name} | ({"KVLAB_PATCH": strategy} if strategy else {})
    return Case(env, args, "off", trigger=trigger)


CASES: dict[str, Case] = {
    "off": Case(OFF, mixed=True),
    "off_again": Case(OFF, against="off", mixed=True),
    # Nothing set at all: what `pip install kvlab` and a restart do.
    "installed": Case({}, against="off", mixed=True),
    "fast": Case({"KVLAB_PATCH": "fast"}, against="off", mixed=True),
    "gather": Case({"KVLAB_PATCH": "gather"}, against="off"),
    "excluded": Case(NO_PLUGIN, against="off"),
    "applied_before": Case(NO_PLUGIN, against="off", applies="exact"),
    # With the plugin too, which is told otherwise.
    "argument": Case({"KVLAB_PATCH": "gather"}, against="off", applies="exact"),
    "silent": Case({}, {"log_level": "error"}, "off"),
    "fa3_off": Case(OFF, FA3),
    "fa3": Case({}, FA3, "fa3_off"),
    "fa3_pages_off": Case(OFF, FA3_P64),
    "fa3_pages": Case({}, FA3_P64, "fa3_pages_off"),
    "no_graphs": Case({}, {"disable_cuda_graph": True}, "no_graphs_off"),
    "no_graphs_off": Case(OFF, {"disable_cuda_graph": True}),
    # What two servers that have the GPU to themselves answer, and what others answer that share it.
    "quiet": Case(OFF, rounds=3),
    "quiet_in_turn": Case(OFF, IN_TURN, rounds=3),
    "busy_off": Case(OFF, against="quiet", rounds=4, shares=True),
    "busy_off_again": Case(OFF, against="quiet", rounds=4, shares=True),
    "busy_off_in_turn": Case(OFF, IN_TURN, "quiet_in_turn", rounds=4, shares=True),
    "busy": Case({}, against="quiet", rounds=4, shares=True),
    "busy_again": Case({}, against="quiet", rounds=4, shares=True),
    "busy_in_turn": Case({}, IN_TURN, "quiet_in_turn", rounds=4, shares=True),
    "altered": Case({}, against="off", altered=True),
    "altered_strict": Case({"KVLAB_PATCH_STRICT": "1"}, altered=True),
    "strict": Case({"KVLAB_PATCH_STRICT": "1"}, against="off"),
    # So small a pool is left to stock, which strict does not serve: the scheduler finds out.
    "strict_small_pool": Case({"KVLAB_PATCH_STRICT": "1"}, {"max_total_tokens": 2048}),
    "mistyped": Case({"KVLAB_PATCH": "exakt"}),
    "tp2_off": Case(OFF, TP2),
    "tp2": Case({}, TP2, "tp2_off"),
    "tp2_fast": Case({"KVLAB_PATCH": "fast"}, TP2),
    "dp2_off": Case(OFF, DP2),
    "dp2": Case({}, DP2, "dp2_off"),
    "pp2_off": Case(OFF, PP2),
    "pp2": Case({}, PP2, "pp2_off"),
    "nextn_off": Case(OFF, NEXTN),
    "nextn": Case({}, NEXTN, "nextn_off"),
    "nextn_fast": Case({"KVLAB_PATCH": "fast"}, NEXTN, "nextn_off"),
    "deep_off": Case(OFF | {"KVLAB_TEST_FAULT": "seeded_dummy_weights"}, DEEP, new_tokens=16),
    "deep": Case({"KVLAB_TEST_FAULT": "seeded_dummy_weights"}, DEEP, "deep_off", new_tokens=16),
    "fault_self_check": _fault("self_check_raises"),
    "fault_wrong_bit": _fault("self_check_is_wrong"),
    "fault_joint": _fault("joint_is_wrong"),
    "fault_capture": _fault("capture_raises"),
    "fault_serving": _fault("serving_raises", trigger=True),
    "fault_compile": _fault("compile_fails"),
    "fault_nvrtc": Case({"KVLAB_TEST_FAULT": "no_nvrtc", "KVLAB_PATCH": "fast"}),
    "fault_scratch": _fault("no_scratch"),
    "fault_half": _fault("half_applied"),
    "fault_removed": _fault("removed_while_serving", trigger=True),
    "fault_another": _fault("another_while_serving", trigger=True),
    "fault_eager": replace(
        _fault("serving_raises", trigger=True, disable_cuda_graph=True), against="no_graphs_off"
    ),
    "fault_again": replace(
        _fault("repeated_launch_raises", trigger=True, disable_cuda_graph=True), against="no_graphs_off"
    ),
    # So large a pool that one BF16 layer of it does not fit beside it: stock could not serve it at all.
    "no_room": Case({}, NO_ROOM, "off"),
    "no_room_off": Case(OFF, NO_ROOM),
}


def _modes() -> dict[str, Case]:
    """Of each mode a server without the patch, in some a second one, and one or two with it."""
    cases: dict[str, Case] = {}
    for name, mode in MODES.items():
        env = mode.env | {"KVLAB_TEST_FAULT": ",".join(("witness", *mode.faults))}
        again = f"{name}_off_again" if mode.repeats else ""
        common = Case(
            env,
            # Many start at once: multiplexing captures each size once a pair of streams.
            {"mem_fraction_static": 0.95, "cuda_graph_bs_decode": [1, 4, 16], **IN_TURN, **mode.args},
            against=f"{name}_off",
            mixed=mode.mixed,
            shares=not mode.alone,
            then=mode.then,
            model=mode.model,
            holds=True,
            shows=mode.shows,
            repeats=again,
        )
        cases[f"{name}_off"] = replace(common, env=OFF | env, against="")
        if again:
            cases[again] = replace(common, env=OFF | env)
        cases[name] = common
        if mode.fast:
            cases[f"{name}_fast"] = replace(common, env=env | {"KVLAB_PATCH": "fast"})
    return cases


CASES |= _modes()


def prompt(length: int, changed: int | None = None) -> list[int]:
    ids = [100 + (length * 7 + i * 17 + i * i) % 9000 for i in range(length)]
    if changed is not None:
        ids[changed] += 1
    return ids


# Together more than the pool of the case that evicts.
FILL = [prompt(n) for n in range(1901, 1906)]
CROWD = [prompt(n, changed) for n in LENGTHS for changed in (None, 3, 5)]
