# SPDX-License-Identifier: Apache-2.0
"""What the worker tells the scheduler about one verify round.

The report travels as an extra attribute of ``ModelRunnerOutput`` (a plain
dataclass, pickled or handed over as is), so it needs no upstream field.
"""

from dataclasses import dataclass

REPORT_ATTRIBUTE = "dspark_capacity"


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Outcome of one verify round.

    Attributes:
        active: True at or above the knee, where capacity plans the step.
        verified_drafts: Drafts that the target judged, one entry per request in
            the order of ``ModelRunnerOutput.req_ids``; None when every scheduled
            draft was judged.
        next_depth: Depth at which to draft from the next scheduled step on; None
            leaves the logical depth K.
        num_reqs: Decode requests for which ``next_depth`` was chosen.
        depth_of_load: Depth to begin with by number of scheduled requests, before
            any wish for that load is known: K below the knee. Empty where the depth
            is fixed; None where it has not changed since the last report.
            Shape [max_num_reqs + 1].
    """

    active: bool
    verified_drafts: list[int] | None = None
    next_depth: int | None = None
    num_reqs: int = 0
    depth_of_load: tuple[int, ...] | None = None
