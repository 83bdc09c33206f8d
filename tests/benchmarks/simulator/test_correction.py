# SPDX-License-Identifier: Apache-2.0
"""Cost tables follow the step times of a served sweep."""

import json

import numpy as np
import pytest

from benchmarks.simulator.correction import ServedStep, correct_costs, step_ratios
from benchmarks.simulator.recorded import load_start_ms
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

REQS = np.arange(65)
COSTS = StepCosts(
    {3: 1.0 + 0.0 * REQS, 7: 2.0 + 0.0 * REQS},
    {3: 5.0 + 0.1 * REQS, 7: 5.0 + 0.2 * REQS},
    5.0 + 0.025 * np.arange(513),
)


def served(ratio_of_tokens, loads=(8, 16, 32, 64)):
    return [
        ServedStep(r, d + 1, ratio_of_tokens(r * (d + 1)) * COSTS.uniform_step_ms(d, r))
        for d in (3, 7)
        for r in loads
    ]


def test_served_as_profiled_changes_nothing():
    corrected = correct_costs(COSTS, served(lambda tokens: 1.0))
    np.testing.assert_allclose(corrected.verify_varlen_ms, COSTS.verify_varlen_ms)
    for d in (3, 7):
        np.testing.assert_allclose(corrected.draft_ms[d], COSTS.draft_ms[d])


def test_ratio_is_interpolated_between_and_held_beyond():
    corrected = correct_costs(COSTS, served(lambda t: 1.0 if t <= 64 else 1.2))
    ratio = corrected.verify_varlen_ms / COSTS.verify_varlen_ms
    assert ratio[8] == pytest.approx(1.0) and ratio[512] == pytest.approx(1.2)
    assert 1.0 < ratio[90] < 1.2


def test_as_many_tokens_of_fewer_requests_may_have_another_ratio():
    ratio = {3: 1.1, 7: 0.9}
    steps = [
        ServedStep(r, d + 1, ratio[d] * COSTS.uniform_step_ms(d, r))
        for d in (3, 7)
        for r in (16, 32, 64)
    ]
    corrected = correct_costs(COSTS, steps)
    for d in (3, 7):
        # 64 x 4 tokens and 32 x 8 are as many.
        whole = COSTS.uniform_step_ms(d, 256 // (d + 1)) * ratio[d]
        assert corrected.uniform_step_ms(d, 256 // (d + 1)) == pytest.approx(whole)
    # One load of a depth is too little to follow its requests.
    alone = [s for s in steps if s.width == 4] + [steps[-1]]
    corrected = correct_costs(COSTS, alone)
    assert corrected.uniform_step_ms(7, 8) == pytest.approx(
        1.1 * COSTS.uniform_step_ms(7, 8)
    )


def test_one_noisy_cell_does_not_move_the_curve():
    steps = served(lambda tokens: 1.0)
    noisy = [
        ServedStep(
            s.num_reqs,
            s.width,
            s.ms * (1.3 if (s.num_reqs, s.width) == (16, 8) else 1.0),
        )
        for s in steps
    ]
    noisy = [s for s in noisy if (s.num_reqs, s.width) != (32, 4)]
    assert max(step_ratios(COSTS, noisy).values()) == pytest.approx(1.3)
    corrected = correct_costs(COSTS, noisy)
    np.testing.assert_allclose(corrected.verify_varlen_ms, COSTS.verify_varlen_ms)


def test_steps_that_fit_no_table_are_an_error():
    with pytest.raises(ValueError, match="fixed arms"):
        correct_costs(COSTS, [ServedStep(8, 3, 7.0), ServedStep(65, 4, 7.0)])


def sweep_records(concurrency, *, start_ms, step_ms, widths=1, **labels):
    """Return a level's two records: 20 steps, 100 tokens."""
    case = {"concurrency": concurrency, **labels}
    times = {f"{w + 2}.00": step_ms for w in range(widths)}
    seconds = (start_ms + 20 * step_ms) / 1000.0
    return [
        {
            "bench": "sweep_concurrency",
            "metric": "throughput",
            "arm": "fixed3",
            "case": case,
            "samples": [1.0, 100 / seconds],
        },
        {
            "bench": "sweep_concurrency.steps",
            "metric": "steps",
            "arm": "fixed3",
            "case": case | {"num_steps": 20, "num_tokens": 100, "step_ms": times},
            "samples": [0.0],
        },
    ]


def test_small_drained_loads_of_one_width_show_what_a_start_takes(tmp_path):
    path = tmp_path / "sweep.jsonl"
    counted = [
        *sweep_records(1, start_ms=20.0, step_ms=6.0),
        *sweep_records(8, start_ms=24.0, step_ms=7.0),
    ]
    passed_over = [
        *sweep_records(64, start_ms=500.0, step_ms=9.0),
        *sweep_records(4, start_ms=500.0, step_ms=9.0, widths=2),
        *sweep_records(2, start_ms=500.0, step_ms=9.0, traffic="steady"),
    ]
    lines = [json.dumps(r) for r in counted + passed_over]
    path.write_text("\n".join(lines))
    assert load_start_ms(path) == pytest.approx(22.0)
    path.write_text("\n".join(json.dumps(r) for r in passed_over))
    assert load_start_ms(path) == 0.0
