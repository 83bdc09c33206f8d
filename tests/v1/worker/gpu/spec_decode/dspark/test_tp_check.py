# SPDX-License-Identifier: Apache-2.0
"""Ranks agree by the broadcast, and the check sees it when they do not.

Most cases are two real gloo processes with the real manager, mirror, planner and
admission on CPU tensors; one pair of processes runs them all.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.tp_ranks import (
    CURVE,
    FAULT_STEP,
    MAX_REQS,
    NUM_DRAFTS,
    RankTrace,
    Scenario,
    measured_keys,
    run_ranks,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import StepPlan
from vllm.v1.worker.gpu.spec_decode.dspark.tp_check import (
    FIELDS,
    describe_differences,
    make_tp_check,
)

NUM_STEPS = 2000
AGREEING = {
    drift: Scenario(drift=drift, num_steps=NUM_STEPS)
    for drift in ("none", "ulp", "large", "nan")
}
AGREEING |= {
    "threshold": Scenario(
        num_steps=NUM_STEPS, keys={"dspark_confidence_threshold": 0.3}
    ),
    "fraction": Scenario(num_steps=NUM_STEPS, keys={"dspark_budget_frac": 0.4}),
    "checked": Scenario(num_steps=NUM_STEPS, check=1),
    "timed": Scenario(num_steps=NUM_STEPS, times=True, keys=measured_keys()),
}
# Costs that hardly rise: everything is verified, and most steps are quiet.
QUIET = Scenario(
    num_steps=NUM_STEPS,
    check=1,
    keys={"dspark_sps_curve": [[8, 100.0], [80, 99.0]]},
    steady=True,
)
UNCHECKED = {
    drift: Scenario(drift=drift, num_steps=NUM_STEPS, fault="no_broadcast")
    for drift in ("ulp", "large", "nan")
}
OWN_TIMES = Scenario(
    drift="none",
    num_steps=NUM_STEPS,
    fault="own_times",
    times=True,
    keys=measured_keys(),
)
FAULTY = {
    "no_broadcast": Scenario(drift="ulp", fault="no_broadcast", check=1),
    "host_view": Scenario(fault="host_view", check=1),
    "device_view": Scenario(fault="device_view", check=1),
    "dump": Scenario(drift="ulp", fault="no_broadcast", check=2),
    "dump_device_view": Scenario(fault="device_view", check=2),
}
MESSAGE = re.compile(r"disagree in step (\d+) at the (\w+) .*?: (.*?)\. All ranks")
DIRECTORY = re.compile(r"inputs are in (\S+)\.$")


@pytest.fixture(scope="module")
def temp_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def traces(temp_dir) -> dict[str, tuple[RankTrace, ...]]:
    scenarios = {
        **AGREEING,
        **{f"unchecked_{name}": s for name, s in UNCHECKED.items()},
        **FAULTY,
        "own_times": OWN_TIMES,
        "quiet": QUIET,
    }
    results = run_ranks(list(scenarios.values()), temp_dir)
    return dict(zip(scenarios, results, strict=True))


def num_mismatches(first: RankTrace, second: RankTrace) -> int:
    rows = (zip(t.plans, t.capacities, strict=True) for t in (first, second))
    return sum(a != b for a, b in zip(*rows, strict=True))


@pytest.mark.parametrize("name", AGREEING)
def test_drift_of_one_rank_changes_no_step(traces, name):
    first, second = traces[name]
    assert first.error is None and second.error is None
    assert len(first.plans) == NUM_STEPS
    if name != "none":
        assert second.num_drifted == NUM_STEPS and first.num_drifted == 0
    assert second.num_nan_rows == 0, "rank 1's own values are never used"
    active = [plan[0] for plan in first.plans]
    crossings = sum(a != b for a, b in pairwise(active))
    assert crossings > 50, "premise: the knee is crossed up and down"
    trimmed = [row for row in first.capacities if row[0] >= 0]
    assert len(trimmed) > NUM_STEPS / 4, "premise: steps trim"
    assert num_mismatches(first, second) == 0


def test_curve_mode_takes_every_kind_of_decision(traces):
    plans = np.array(traces["none"][0].plans)
    assert len(set(plans[:, 1])) > 10, "premise: budgets differ"
    assert len(set(plans[:, 3])) > 2, "premise: depths differ"


def test_decisions_are_those_without_drift(traces):
    undisturbed = traces["none"]
    for drift in ("ulp", "large", "nan", "checked"):
        assert traces[drift][1].plans == undisturbed[0].plans
        assert traces[drift][1].capacities == undisturbed[0].capacities


@pytest.mark.parametrize("drift", UNCHECKED)
def test_without_the_broadcast_ranks_part_unnoticed(traces, drift):
    first, second = traces[f"unchecked_{drift}"]
    assert first.error is None and second.error is None
    assert num_mismatches(first, second) > 10


def first_step(trace: RankTrace, column: str) -> int:
    """Return the first step from FAULT_STEP on that is active, or that trims."""
    rows = trace.plans if column == "active" else trace.capacities
    for step in range(FAULT_STEP, len(rows) + 1):
        if rows[step - 1][0] >= (1 if column == "active" else 0):
            return step
    raise AssertionError("premise: there is such a step")


def test_ranks_learn_costs_from_the_step_times_of_rank_0(traces):
    first, second = traces["timed"]
    assert first.num_factors == second.num_factors > 0, "premise: costs are corrected"
    own_first, own_second = traces["own_times"]
    assert num_mismatches(own_first, own_second) > 0, "without the exchange they part"


def test_ranks_agree_on_which_steps_are_quiet(traces):
    first, second = traces["quiet"]
    assert first.error is None and second.error is None
    assert num_mismatches(first, second) == 0
    assert first.published == second.published
    assert sum(first.published) < NUM_STEPS / 2, "premise: most steps are quiet"
    assert len(first.published) == second.num_drifted == NUM_STEPS


@pytest.mark.parametrize("name", FAULTY)
def test_every_rank_raises_and_names_the_same_step(traces, name):
    texts = [trace.error for trace in traces[name]]
    for rank, text in enumerate(texts):
        assert text.startswith("TensorParallelMismatchError")
        assert f"(this is rank {rank})" in text
    found = [MESSAGE.search(text).groups() for text in texts]
    assert found[0] == found[1]
    step = int(found[0][0])
    assert step >= FAULT_STEP
    assert [len(trace.plans) for trace in traces[name]] == [step - 1] * 2


def test_a_lost_broadcast_is_seen_in_its_own_step(traces):
    step, stage, what = MESSAGE.search(traces["no_broadcast"][0].error).groups()
    assert stage == "publication"
    assert int(step) == first_step(traces["none"][0], "active")
    assert re.fullmatch(
        r"crc32 of confidence_probs is \d+ on ranks \[0\], \d+ on ranks \[1\]", what
    )


def test_other_survivals_are_seen_in_the_plan(traces):
    step, stage, what = MESSAGE.search(traces["host_view"][0].error).groups()
    assert stage == "plan"
    assert int(step) == first_step(traces["none"][0], "active")
    assert "crc32 of survival_probs is" in what


def test_other_capacities_are_seen_at_admission(traces):
    step, stage, what = MESSAGE.search(traces["device_view"][0].error).groups()
    assert stage == "admission"
    assert int(step) >= first_step(traces["none"][0], "trims")
    assert re.match(r"capacities\[\d+\] is \d on ranks \[0\], \d on ranks \[1\]", what)
    assert "draft_budget" not in what, "the plans agreed"


@pytest.mark.parametrize("name", ["no_broadcast", "host_view", "device_view"])
def test_level_1_says_how_to_dump(traces, name):
    assert traces[name][0].error.endswith(
        "Set VLLM_DSPARK_TP_CHECK=2 to dump every rank's inputs."
    )


@pytest.mark.parametrize("name", ["dump", "dump_device_view"])
def test_level_2_dumps_the_inputs_of_every_rank(traces, temp_dir, name):
    folders = {DIRECTORY.search(trace.error)[1] for trace in traces[name]}
    [folder] = map(Path, folders)
    assert folder.parent == temp_dir
    step, stage, differences = MESSAGE.search(traces[name][0].error).groups()
    dumps = []
    for rank in (0, 1):
        path = folder / f"step{int(step):06d}-{stage}-rank{rank}"
        described = json.loads(Path(f"{path}.json").read_text())
        assert (described["step"], described["rank"]) == (int(step), rank)
        assert described["stage"] == stage
        assert described["differences"] == differences
        assert described["plan"]["active"] is True
        assert len(described["digests_by_rank"]) == 2
        dumps.append(np.load(f"{path}.npz"))
    first, second = dumps
    num_reqs = len(first["slots"])
    for array in (first["survival_probs"], first["confidence_probs"]):
        assert array.shape == (num_reqs, NUM_DRAFTS)
    np.testing.assert_array_equal(first["num_draft_tokens"], second["num_draft_tokens"])
    differing = "new_confidence_probs" if name == "dump" else "capacities"
    assert (first[differing] != second[differing]).any()
    if name == "dump_device_view":
        assert (first["confidence_probs"] != second["confidence_probs"]).any()


def test_nothing_is_dumped_while_ranks_agree(traces, temp_dir):
    dumped = {p.name for p in temp_dir.glob("dspark-tp-check-*")}
    named = {
        Path(DIRECTORY.search(traces[name][0].error)[1]).name
        for name in ("dump", "dump_device_view")
    }
    assert dumped == named and len(named) == 2


@pytest.mark.parametrize(
    ("level", "num_ranks", "checks"), [(0, 2, 0), (2, 1, 0), (1, 2, 1), (2, 2, 1)]
)
def test_no_check_object_without_two_ranks_and_a_level(level, num_ranks, checks):
    group = SimpleNamespace(world_size=num_ranks)
    check = make_tp_check(level, group, SimpleNamespace(), MAX_REQS)
    assert (check is not None) == checks


def digest(num_ranks: int, **entries: int) -> np.ndarray:
    gathered = np.full((num_ranks, len(FIELDS) + MAX_REQS), -1, dtype=np.int64)
    gathered[:, 0] = 0
    for name, value in entries.items():
        gathered[:, FIELDS.index(name)] = value
    return gathered


def test_differences_group_ranks_by_value():
    gathered = digest(8, step=3, active=1, draft_budget=5)
    assert describe_differences(gathered) == ""
    gathered[[2, 7], FIELDS.index("draft_budget")] = 4
    gathered[4, FIELDS.index("draft_budget")] = -1
    assert describe_differences(gathered) == (
        "draft_budget is 5 on ranks [0, 1, 3, 5, 6], 4 on ranks [2, 7], "
        "unset on ranks [4]"
    )


def test_differences_name_stages_and_few_of_many_rows():
    gathered = digest(2, active=1)
    gathered[1, :3] = 2, 9, 0
    gathered[1, len(FIELDS) :] = 1
    text = describe_differences(gathered)
    assert text.startswith("stage is plan on ranks [0], publication on ranks [1]; ")
    assert "active is True on ranks [0], False on ranks [1]" in text
    assert "capacities[3] is" in text and "capacities[4] is" not in text
    assert text.endswith(f"; {MAX_REQS - 4} more capacities differ")


def test_the_digest_holds_the_whole_plan():
    assert set(StepPlan.__dataclass_fields__) <= set(FIELDS)
    assert {"active", "draft_budget", "next_depth"} <= set(FIELDS)


@pytest.mark.parametrize("level", [0, 2])
def test_one_rank_neither_broadcasts_nor_checks(monkeypatch, level):
    import torch

    import vllm.v1.worker.cpu.shm  # noqa: F401  (torch.cuda names on a CPU)
    from tests.helpers import tp_ranks
    from vllm.v1.worker.gpu.spec_decode import capacity

    calls: list[str] = []
    group = SimpleNamespace(
        world_size=1, broadcast=lambda *args, **kwargs: calls.append("broadcast")
    )
    monkeypatch.setattr(capacity, "get_tp_group", lambda: group)
    for name in ("all_gather", "broadcast"):
        monkeypatch.setattr(
            torch.distributed, name, lambda *args, name=name: calls.append(name)
        )
    scenario = Scenario(
        num_steps=30, check=level, keys={"dspark_sps_curve": CURVE}, drift="none"
    )
    trace = tp_ranks._run(scenario, rank=0)
    assert trace.error is None
    assert any(plan[0] for plan in trace.plans), "premise: capacity acts"
    assert any(row[0] >= 0 for row in trace.capacities), "premise: drafts are ranked"
    assert calls == []
