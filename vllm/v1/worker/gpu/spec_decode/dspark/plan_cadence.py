# SPDX-License-Identifier: Apache-2.0
"""When to plan: every step while plans differ, seldom while nothing is to be decided.

Under a steady load whose plans verify everything a plan costs the host more than it
can bring. After ``CALM_PLANS`` such plans only every ``PERIOD``-th step is planned, and
only the two steps before it publish. A plan reads the round made two steps before it,
which the publication one step before it releases, and it may trim only if that last
one, the drafts in hand, was published as well.

Standard library only. A function of loads and plans, so equal on every rank.

Invariants (pinned by tests/.../dspark/test_plan_cadence.py):
  * No step is quiet unless the last ``CALM_PLANS`` plans verified everything, at a
    settled depth, without prefill, with equal drafts and about as many requests.
  * At most ``PERIOD`` - 1 steps in a row are quiet, and the two steps before a plan
    were published.
  * A step whose load is another one is planned and published.
"""

from typing import NamedTuple

# Plans that must agree before steps go unplanned, and how many steps a plan then
# lasts. As long as the interval between depth plans, so that both are made together.
CALM_PLANS = 8
PERIOD = 8
# Relative change of the batch that is another load; as for a new depth plan.
RELOAD = 0.125


class Load(NamedTuple):
    """What a step is asked to do.

    Attributes:
        num_reqs: Requests R.
        num_decodes: Those past their prompts.
        num_tokens: Scheduled tokens. With equal drafts they are R times a width; in
            quiet steps nothing else is looked at, since no request can have more
            drafts than the depth that all of them have.
    """

    num_reqs: int
    num_decodes: int
    num_tokens: int


class PlanCadence:
    """Per step: ``is_quiet``; if it is not, ``planned`` after the plan. Then
    ``publishes`` says what becomes of the step's drafts.

    Args:
        enabled: False: every step is planned.
    """

    def __init__(self, *, enabled: bool = True):
        self._enabled = enabled
        self.reset()

    def reset(self) -> None:
        """Forget the past: the next step is planned."""
        self._num_calm = 0
        self._reference = Load(0, 0, 0)
        self._quiet = False
        # Place of the present step in its period; a plan that is due is at 0.
        self._phase = 0
        self._num_skipped = 0

    @property
    def publishes(self) -> bool:
        """Whether the present step's drafts are published."""
        return not self._quiet or self._phase >= PERIOD - 2

    @property
    def follows_publication(self) -> bool:
        """Whether a quiet step and the step before it are both published."""
        return self._quiet and self._phase == PERIOD - 1

    @property
    def num_skipped(self) -> int:
        """Quiet steps since the last plan."""
        return self._num_skipped

    def is_quiet(self, load: Load) -> bool:
        """Begin a step; return whether it does what the last plan said.

        Args:
            load: The step's load.
        """
        if self._quiet and not self._is_alike(load):
            self._quiet = False  # and the plan of it counts as the first again
        self._phase += 1
        if not self._quiet or self._phase >= PERIOD:
            return False
        self._num_skipped += 1
        return True

    def planned(self, load: Load, *, is_calm: bool, age: int = 0) -> None:
        """Take note of a plan.

        Args:
            load: The step's load.
            is_calm: It verifies everything, the drafts in hand are equal, and the
                depth is the one in use.
            age: Steps since the depth was planned. The period ends when its next plan
                is due, so that later ones begin with it.
        """
        self._num_skipped = 0
        if not is_calm:
            self._num_calm = 0
        elif self._num_calm and self._is_alike(load):
            self._num_calm += 1
        else:
            self._num_calm = int(load.num_decodes == load.num_reqs)
            self._reference = load
        self._quiet = self._enabled and self._num_calm >= CALM_PLANS
        self._phase = age

    def _is_alike(self, load: Load) -> bool:
        reference = self._reference
        change = abs(load.num_reqs - reference.num_reqs)
        return (
            load.num_decodes == load.num_reqs
            and change <= RELOAD * reference.num_reqs
            and load.num_tokens * reference.num_reqs
            == reference.num_tokens * load.num_reqs
        )
