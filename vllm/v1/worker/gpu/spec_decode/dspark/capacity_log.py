# SPDX-License-Identifier: Apache-2.0
"""The periodic log line of ``VLLM_DSPARK_CAPACITY_LOG_INTERVAL``.

Standard library only; a step costs a comparison and a few additions.

Invariants (pinned by tests/.../dspark/test_capacity_log.py):
  * One line an interval at most, none without a step.
  * Every figure is a mean over the steps since the last line.
"""

import logging
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sums:
    """Since the last line."""

    num_steps: int = 0
    num_active: int = 0
    num_decodes: int = 0
    depth: int = 0
    drafts: int = 0
    verified: int = 0


class CapacityLog:
    """Per step: ``note``; logs when the interval is over.

    Args:
        interval_s: Seconds between lines, > 0.
    """

    def __init__(self, interval_s: float):
        self._interval_s = interval_s
        self._sums = _Sums()
        self._next_s = time.monotonic() + interval_s

    def note(
        self,
        *,
        num_decodes: int,
        knee: int,
        depth: int | None,
        num_drafts: int,
        draft_budget: int | None,
        ratio: float | None,
    ) -> None:
        """Take one step.

        Args:
            num_decodes: Decode requests of the batch.
            knee: Requests from which capacity acts.
            depth: Depth wanted for the next drafts; None below the knee.
            num_drafts: Drafts in hand.
            draft_budget: Drafts verified; None: all.
            ratio: Measured over predicted time of the latest compared step; None if
                steps are not compared.
        """
        sums = self._sums
        sums.num_steps += 1
        sums.num_decodes += num_decodes
        if depth is not None:
            sums.num_active += 1
            sums.depth += depth
            sums.drafts += num_drafts
            sums.verified += num_drafts if draft_budget is None else draft_budget
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + self._interval_s
        self._sums = _Sums()
        active = max(sums.num_active, 1)
        logger.info(
            "DSpark capacity: %.1f decode requests (knee %d), %d of %d steps active; "
            "in these depth %.1f, %.1f of %.1f drafts verified; measured/predicted "
            "step time %s",
            sums.num_decodes / sums.num_steps,
            knee,
            sums.num_active,
            sums.num_steps,
            sums.depth / active,
            sums.verified / active,
            sums.drafts / active,
            "not compared" if ratio is None else f"{ratio:.2f}",
        )
