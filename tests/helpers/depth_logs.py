# SPDX-License-Identifier: Apache-2.0
"""Reads the depth logs of engines, see ``engine_depth.py``, in tests of any drafter."""

TARGET_MANAGER = "CapacityCudaGraphManager"
DRAFT_MANAGER = "DepthCudaGraphManager"
# Drafts made before a pin are verified up to two steps after it.
IN_FLIGHT_STEPS = 3


def settled(log: list[dict], depth: int) -> list[dict]:
    """Return a pin's decode-only steps whose drafts in hand were made under it.

    Args:
        log: Records of served steps, in order.
        depth: The pinned depth.
    """
    steps = [record for record in log if record["reported"] == depth]
    return [
        record
        for record in steps[IN_FLIGHT_STEPS:]
        if not record["prefilling"] and not record["skips"]
    ]


def graphs(steps: list[dict], manager: str) -> list[list]:
    """Return the graphs of one manager that some steps replayed."""
    return [row for record in steps for row in record["graphs"] if row[0] == manager]
