# SPDX-License-Identifier: Apache-2.0
"""Capacity on two real tensor-parallel ranks (gloo) under the CPU rehearsal.

2000 steps of agreement, with every kind of drift, are in
spec_decode/dspark/test_tp_check.py; here the whole engine runs, with its model.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine import (
    EngineResult,
    EngineRunError,
    EngineSpec,
    dspark,
    run_engines,
)

pytestmark = pytest.mark.engine
FAULTS = "tests.helpers.tp_faults:"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
# Drops where two requests' drafts no longer fit, so that budgets vary.
CURVE = [[8, 100.0], [24, 50.0], [64, 10.0]]
ACTIVE = {"VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1"}
# Two ranks take 40 s on two idle cores, and many times that on busy ones.
TIMEOUT_S = 580
NUM_BROKEN_TOKENS = 20


def curve_mode(draft: str) -> dict:
    return dspark(
        draft,
        dspark_sps_curve=CURVE,
        dspark_draft_depths=[3, 7],
        dspark_online_sts=True,
    )


def half_budget(draft: str) -> dict:
    """Return a mode whose batch shape no confidence can change, so nothing hangs."""
    return dspark(draft, dspark_budget_frac=0.5)


@pytest.fixture(scope="module")
def one_rank(tiny_target, tiny_draft, heldout_prompts) -> list[EngineResult]:
    """No speculation, and capacity with the check asked for; one rank."""
    return run_engines(
        [
            EngineSpec(model=tiny_target, prompts=heldout_prompts),
            EngineSpec(
                model=tiny_target,
                prompts=heldout_prompts,
                speculative_config=curve_mode(tiny_draft),
                worker_setup=FAULTS + "record_decisions",
                worker_probe=FAULTS + "decisions",
            ),
        ],
        env={**ACTIVE, "VLLM_DSPARK_TP_CHECK": "2"},
        timeout_s=TIMEOUT_S,
    )


def run_two_ranks(
    speculative_config: dict, fault: str, prompts: list[str], env: dict[str, str]
) -> EngineResult:
    target = str(Path(speculative_config["model"]).with_name("target"))
    broken = fault != "drift"
    spec = EngineSpec(
        model=target,
        prompts=prompts,
        speculative_config=speculative_config,
        # Wrong verification accepts little, so its tokens are slow to come.
        sampling={"max_tokens": NUM_BROKEN_TOKENS} if broken else {},
        engine={"tensor_parallel_size": 2},
        worker_setup=FAULTS + fault,
        worker_probe=FAULTS + "decisions",
    )
    [result] = run_engines([spec], env={**ACTIVE, **env}, timeout_s=TIMEOUT_S)
    return result


def test_one_rank_broadcasts_nothing_and_checks_nothing(one_rank):
    plain, capacity = one_rank
    [seen] = capacity.probes
    assert any(step[-1] is not None for step in seen["steps"]), "premise: it ranks"
    assert seen["num_broadcasts"] == 0
    assert not seen["checks"]
    assert capacity.tokens == plain.tokens


def test_drift_of_one_rank_changes_neither_decisions_nor_output(
    one_rank, tiny_draft, heldout_prompts
):
    plain, capacity = one_rank
    drifted = run_two_ranks(
        curve_mode(tiny_draft), "drift", heldout_prompts, {"VLLM_DSPARK_TP_CHECK": "1"}
    )
    first, second = drifted.probes
    active = [step for step in first["steps"] if step[0]]
    assert any(step[-1] is not None for step in active), "premise: steps trim"
    assert {step[3] for step in active} == {3, 7}, "premise: the depth changes"
    assert first["num_drifted"] == 0
    assert second["num_drifted"] == len(active)
    assert [p["num_broadcasts"] for p in drifted.probes] == [len(active)] * 2
    assert first["checks"] and second["checks"]
    assert first["steps"] == second["steps"]
    # Rank 0's temperatures are everybody's, although it alone has any.
    assert first["calibrates"] and not second["calibrates"]
    assert set(second["scales"]) == {1.0} and first["scales"] != second["scales"]
    assert second["num_nan_rows"] == 0
    assert drifted.metrics[ACCEPTED] > 0
    assert drifted.tokens == capacity.tokens == plain.tokens


def test_without_broadcast_and_check_the_output_is_wrong(
    one_rank, tiny_draft, heldout_prompts
):
    plain, _ = one_rank
    broken = run_two_ranks(
        half_budget(tiny_draft), "drift_without_broadcast", heldout_prompts, {}
    )
    first, second = broken.probes
    assert not first["checks"] and first["num_broadcasts"] == 0
    assert [s[:4] for s in first["steps"]] == [s[:4] for s in second["steps"]]
    assert first["steps"] != second["steps"], "capacities differ"
    expected = [[s[:NUM_BROKEN_TOKENS] for s in samples] for samples in plain.tokens]
    assert broken.tokens != expected


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """A folder whose name leaves room for the names of the ranks' sockets."""
    with tempfile.TemporaryDirectory(prefix="tp") as folder:
        yield Path(folder)


def test_check_2_stops_a_lost_broadcast_and_dumps(
    tiny_draft, heldout_prompts, short_tmp_path
):
    tmp_path = short_tmp_path
    with pytest.raises(EngineRunError) as error:
        run_two_ranks(
            half_budget(tiny_draft),
            "drift_without_broadcast",
            heldout_prompts,
            {"VLLM_DSPARK_TP_CHECK": "2", "TMPDIR": str(tmp_path)},
        )
    step = int(re.search(r"disagree in step (\d+) at the", str(error.value))[1])
    [folder] = tmp_path.glob("dspark-tp-check-*")
    assert str(folder) in str(error.value)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        f"step{step:06d}-publication-rank{rank}.{kind}"
        for rank in (0, 1)
        for kind in ("json", "npz")
    ]
    described = json.loads(Path(folder, names[0]).read_text())
    assert described["plan"]["active"]
