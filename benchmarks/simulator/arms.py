# SPDX-License-Identifier: Apache-2.0
"""From arm names to policies."""

import re

from benchmarks.simulator.calibrators import FixedTemperature, HostOnlineSTS
from benchmarks.simulator.ours import CapacityPolicy, RecordedCosts
from benchmarks.simulator.policies import (
    FixedPolicy,
    OraclePolicy,
    Policy,
    UpstreamPolicy,
)
from benchmarks.sweep.arms import Arm
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

# Logits rows of one chunk: 1 GiB of float32 at Qwen3's vocabulary of 151936.
DEFAULT_MAX_LOGITS = 1766


def default_arms(costs: StepCosts) -> list[str]:
    """Return none, every fixed depth, and the three that adapt, at the deepest."""
    full = costs.depths[-1]
    fixed = [f"fixed{d}" for d in costs.depths if d]
    return ["none", *fixed, f"upstream{full}", f"capacity{full}", f"oracle{full}"]


def make_policy(
    name: str,
    costs: StepCosts,
    *,
    knee: int = 0,
    temperature: float = 1.0,
    online_sts: bool = False,
    max_total_logits: int = DEFAULT_MAX_LOGITS,
) -> Policy:
    """Build the policy of an arm.

    Args:
        name: ``none``, ``fixedD``, ``upstreamK``, ``capacityK`` or ``oracleK``.
        costs: Cost tables that the arm plans with.
        knee: Requests from which ``capacity`` acts; 0 for the automatic knee.
        temperature: Of ``capacity``'s confidences.
        online_sts: ``capacity`` learns to correct them, from this temperature on.
        max_total_logits: Most logits rows of a trimmed batch.

    Raises:
        ValueError: Unknown arm, or a depth that the tables do not hold.
    """
    if oracle := re.fullmatch(r"oracle([1-9][0-9]?)", name.strip()):
        kind, depth = "oracle", int(oracle[1])
    else:
        try:
            arm = Arm.parse(name)
        except ValueError as e:
            raise ValueError(f"{e} (or oracleK)") from None
        kind, depth = arm.kind, arm.depth
    if kind == "pinned":
        raise ValueError(f"arm {name!r}: simulate fixed{depth} instead")
    if depth and depth not in costs.depths:
        raise ValueError(
            f"arm {name!r}: the cost tables hold depths {list(costs.depths)}; profile "
            "the depth or choose one of them"
        )
    depths = tuple(d for d in costs.depths if d <= depth)
    if kind == "upstream":
        return UpstreamPolicy(costs, depth, max_total_logits)
    if kind == "oracle":
        return OraclePolicy(costs, depths, max_total_logits)
    if kind == "capacity":
        recorded = RecordedCosts.at_knee(costs, depth, knee)
        calibrator = (
            HostOnlineSTS(temperature, depth)
            if online_sts
            else FixedTemperature(temperature)
        )
        return CapacityPolicy(recorded, depth, depths, max_total_logits, calibrator)
    return FixedPolicy(depth)
