# SPDX-License-Identifier: Apache-2.0
"""Watch online STS in an engine whose confidence head was distorted.

For ``EngineSpec.worker_setup`` and ``worker_probe``. The head's output is distorted
where the captured draft graphs call it.
"""

from typing import Any

import numpy as np
import torch

# Of the confidence head's logits.
DISTORTION = 0.25


def distort_and_watch(worker: Any) -> None:
    """Flatten the head and log what every step did to the calibration."""
    from vllm.v1.worker.gpu.spec_decode.dspark import online_sts

    runner = worker.model_runner
    online_sts.FIT_INTERVAL = 4
    model = runner.speculator.model
    compute_confidence = model.compute_confidence

    def distorted(*args: Any) -> torch.Tensor:
        logits = torch.logit(compute_confidence(*args), eps=1e-6)
        return torch.sigmoid(DISTORTION * logits)

    model.compute_confidence = distorted
    runner.sts_log = []
    if runner.online_sts is not None:
        _watch(runner)


def _watch(runner: Any) -> None:
    sts, sample_tokens = runner.online_sts, runner.sample_tokens
    address = sts.calibration.data_ptr()
    launches = {"observe": 0, "excluded": 0}
    observe = sts.observe

    def counted(judged: Any, draft_depth: int, grammar_rows: Any = None) -> None:
        launches["observe"] += 1
        launches["excluded"] += 0 if grammar_rows is None else len(grammar_rows)
        observe(judged, draft_depth, grammar_rows)

    def logged(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        in_force = sts.calibration.clone()
        before = dict(launches)
        output = sample_tokens(grammar_output)
        if state is None:
            return output
        depth = state.num_spec_tokens_to_schedule
        runner.sts_log.append(
            {
                "active": runner._step_plan.active,
                "observed": launches["observe"] - before["observe"],
                "excluded": launches["excluded"] - before["excluded"],
                "rows": sts.ring.num_rows.tolist(),
                "error": _application_error(runner, state, in_force, depth),
                "moved": float((in_force - torch.from_numpy(sts.start)).abs().max()),
                "same_address": sts.calibration.data_ptr() == address,
            }
        )
        return output

    sts.observe, runner.sample_tokens = counted, logged


def _application_error(runner: Any, state: Any, in_force: Any, depth: int) -> float:
    """Return how far the confidences are from what the scales in force make."""
    speculator, slots = runner.speculator, state.input_batch.idx_mapping
    num_reqs = slots.shape[0]
    if depth == 0:
        return 0.0
    table = in_force[(speculator.temperature[slots] > 0).long()][:, :, :depth]
    logits = speculator.confidence_logits[:num_reqs, :depth]
    u = table[:, 0] * logits + table[:, 1]
    bent = u + 2.0 * table[:, 2] * torch.log(torch.cosh(0.5 * u))
    expected = torch.sigmoid(bent)
    found = speculator.draft_token_confidence_probs[:num_reqs, :depth]
    return float((expected - found).abs().max())


def sts_log(worker: Any) -> dict[str, Any]:
    """Return the steps, the calibration and the graded rows."""
    runner = worker.model_runner
    sts = runner.online_sts
    found = {"steps": runner.sts_log, "calibrates": sts is not None}
    if sts is None:
        return found
    groups = [sts.ring.graded_rows(group) for group in (0, 1)]
    return found | {
        "calibration": sts.calibration.tolist(),
        "state": sts.state_json(),
        "accepted": [rows.accepted.tolist() for rows in groups],
        "verified": [rows.verified.tolist() for rows in groups],
        "mean_logit": [float(np.abs(rows.logits[:, 0]).mean()) for rows in groups],
    }
