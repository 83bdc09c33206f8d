# SPDX-License-Identifier: Apache-2.0
"""Step cost tables: what one step costs at a depth, batch size and token count.

Everything is stored in milliseconds, because draft and verify times add and
rates do not; steps per second are derived for display and the knee search only.
Standard library and NumPy only (besides equally pure readers of values). Built by
:mod:`.sps_curve`, read by :mod:`.planner`.

Invariants (pinned by tests/.../dspark/test_step_costs.py):
  * Every table is finite, never falls with size and cannot be written to.
  * ``StepCosts.from_json(json.loads(json.dumps(costs.to_json())))`` is exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm.config.dspark_values import is_int, read_choice, read_number

SCHEMA = "vllm-dspark-sps-curve"
VERSION = 1
# Keeps rates finite when a clock with coarse ticks reports 0 ms.
MIN_VERIFY_MS = 1e-6
_CONTEXT = ("verify_context_ms", "draft_context_ms")
_BY_DEPTH = ("draft_ms", "verify_uniform_ms", *_CONTEXT)
# Keys of full tables, by which a curve file says that it has some.
TABLE_KEYS = (*_BY_DEPTH, "verify_varlen_ms")
# No step takes so long, and sums of such times stay exact enough.
MAX_MS = 1e9
Points = list[tuple[int, float]]
REPROFILE = "check dspark_sps_curve, or let 'auto' measure it again"


def _depth(text: str) -> int:
    """Return a depth that is a key of a JSON object, in the one way to write it."""
    if not (text.isascii() and text.isdigit() and str(int(text[:3])) == text):
        raise ValueError(f"{text[:20]!r} is not a draft depth; {REPROFILE}.")
    return int(text)


def _numbers(name: str, values: Any) -> list[float]:
    """Return a JSON list of numbers; a bool or a string is none."""
    if not isinstance(values, list) or not {int, float} >= set(map(type, values)):
        raise ValueError(f"{name} is not a list of numbers; {REPROFILE}.")
    try:
        return [float(value) for value in values]
    except OverflowError:
        raise ValueError(
            f"{name} holds an integer beyond any time; {REPROFILE}."
        ) from None


def _table(name: str, values: Any, num_entries: int | None, floor: float) -> np.ndarray:
    """Check and freeze one table: float64, finite, running maximum, read-only."""
    table = np.array(values, dtype=np.float64)
    if table.ndim != 1 or not len(table) or num_entries not in (None, len(table)):
        raise ValueError(
            f"{name} has shape {table.shape}, expected "
            f"({num_entries or 'at least 1'},); {REPROFILE}."
        )
    if not np.isfinite(table).all() or table.min() < 0.0 or table.max() > MAX_MS:
        raise ValueError(f"{name} must be within 0..{MAX_MS:g} ms; {REPROFILE}.")
    table = np.maximum.accumulate(np.maximum(table, floor))
    table.flags.writeable = False
    return table


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Step cost tables in milliseconds, read-only and never falling with size.

    A step costs ``draft_ms[d][R] + verify + context + overhead_ms`` where verify is
    ``verify_uniform_ms[d][R]`` if every request is ``d + 1`` tokens wide, what
    :meth:`decode_varlen_ms` says if it is trimmed, ``verify_varlen_ms`` by tokens if
    it holds prompts, all without any context, and context is the mean context of
    the requests times ``verify_context_ms[w][R] + draft_context_ms[d][R]`` for
    drafts in hand of width w.

    Attributes:
        draft_ms: Per enabled depth (ascending), float64 [max_num_reqs + 1]. Depth 0
            holds the upkeep of the drafter's context K/V only.
        verify_uniform_ms: Per enabled depth, float64 [max_num_reqs + 1]. Depth 0 is
            plain decoding, one token per request.
        verify_varlen_ms: float64 [max_num_tokens + 1], by target tokens, of as many
            requests as there may be: one token each up to max_num_seqs.
        verify_context_ms: Per depth, milliseconds for each token of mean context,
            float64 [max_num_reqs + 1]; a missing depth costs nothing.
        draft_context_ms: The same of the drafter.
        overhead_ms: Fixed cost of every step, >= 0.
        whole_step: The tables come from a curve of whole steps: the draft time is
            inside the verify tables, so they cannot tell depths apart.
        num_stalled_samples: Samples that were rejected as stalled.

    Raises:
        ValueError: tables that are missing, of unequal length, negative, not finite.
    """

    draft_ms: Mapping[int, np.ndarray]
    verify_uniform_ms: Mapping[int, np.ndarray]
    verify_varlen_ms: np.ndarray
    overhead_ms: float = 0.0
    whole_step: bool = False
    num_stalled_samples: int = 0
    verify_context_ms: Mapping[int, np.ndarray] = field(default_factory=dict)
    draft_context_ms: Mapping[int, np.ndarray] = field(default_factory=dict)
    _decode_varlen_ms: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Check, make monotone and freeze every table."""
        depths = sorted(self.draft_ms)
        if not depths or depths[0] < 0 or depths != sorted(self.verify_uniform_ms):
            raise ValueError(
                f"draft_ms has depths {depths} and verify_uniform_ms "
                f"{sorted(self.verify_uniform_ms)}; both need the same depths, at "
                f"least one, all >= 0; {REPROFILE}."
            )
        if not 0.0 <= self.overhead_ms <= MAX_MS:
            raise ValueError(
                f"overhead_ms is {self.overhead_ms}; it must be within 0..{MAX_MS:g} "
                "(key dspark_sps_overhead_ms of --speculative-config)."
            )
        size = len(self.draft_ms[depths[0]])
        nothing = np.zeros(size)
        for attr, floor in (
            ("draft_ms", 0.0),
            ("verify_uniform_ms", MIN_VERIFY_MS),
            ("verify_context_ms", 0.0),
            ("draft_context_ms", 0.0),
        ):
            given = getattr(self, attr)
            tables = {
                d: _table(f"{attr}[{d}]", given.get(d, nothing), size, floor)
                for d in depths
            }
            object.__setattr__(self, attr, MappingProxyType(tables))
        varlen = _table("verify_varlen_ms", self.verify_varlen_ms, None, MIN_VERIFY_MS)
        object.__setattr__(self, "verify_varlen_ms", varlen)

    @property
    def depths(self) -> tuple[int, ...]:
        """Enabled draft depths, ascending."""
        return tuple(self.draft_ms)

    @property
    def max_num_reqs(self) -> int:
        """Largest request count the tables cover."""
        return len(self.draft_ms[self.depths[0]]) - 1

    @property
    def max_num_tokens(self) -> int:
        """Largest target token count the tables cover."""
        return len(self.verify_varlen_ms) - 1

    def decode_varlen_ms(self, num_reqs: int) -> np.ndarray:
        """Verify time of R decode requests by their target tokens, trimmed.

        So many tokens of few requests cost less than of many: attention goes by
        requests. Between one token each, which the varlen table holds, and the
        uniform batches of each depth, the time is read off the line, at the size
        that the batch is padded to; it is never above the varlen table, whose
        batches have more requests.

        Args:
            num_reqs: Requests R, >= 0.

        Returns:
            float64 ``[R * deepest + 1]`` (fewer where the tables end), read-only:
            entry b is of R + b tokens. Kept, so that a step allocates nothing.
        """
        found = self._decode_varlen_ms.get(num_reqs)
        if found is None:
            found = self._decode_varlen_ms[num_reqs] = self._priced_between(num_reqs)
        return found

    def _priced_between(self, num_reqs: int) -> np.ndarray:
        by_tokens = self.verify_varlen_ms
        most = min(num_reqs * (self.depths[-1] + 1), self.max_num_tokens)
        upper = by_tokens[num_reqs : most + 1]
        if self.whole_step or not num_reqs:
            return upper
        # Equal entries are one graph: a batch is padded to its size.
        padded = np.searchsorted(by_tokens, upper, side="right") - 1
        depths = [d for d in self.depths if padded[0] < num_reqs * (d + 1) <= most]
        tokens = [padded[0], *(num_reqs * (d + 1) for d in depths)]
        uniform = [self.verify_uniform_ms[d][num_reqs] for d in depths]
        # Where a depth has no graph of this size, a varlen one is the better price.
        known = np.minimum([upper[0], *uniform], by_tokens[tokens])
        between = np.interp(padded, tokens, np.maximum.accumulate(known))
        between = np.maximum.accumulate(np.minimum(between, upper))
        between.flags.writeable = False
        return between

    def context_ms(
        self, width: int, depth: int, num_reqs: int, context_tokens: float
    ) -> float:
        """Time that attention to the context takes, milliseconds.

        Args:
            width: Drafts in hand of every request; an unknown width (a mixed batch)
                is priced as the deepest.
            depth: Enabled depth of the drafter pass.
            num_reqs: Requests R.
            context_tokens: Mean context of the requests, >= 0.
        """
        verify = self.verify_context_ms.get(width)
        if verify is None:
            verify = self.verify_context_ms[self.depths[-1]]
        per_token = verify[num_reqs] + self.draft_context_ms[depth][num_reqs]
        return float(per_token) * context_tokens

    def uniform_step_ms(
        self, depth: int, num_reqs: int, context_tokens: float = 0.0
    ) -> float:
        """Whole-step time of the fixed path at ``depth``, milliseconds."""
        verify = self.verify_uniform_ms[depth][num_reqs]
        context = self.context_ms(depth, depth, num_reqs, context_tokens)
        draft = self.draft_ms[depth][num_reqs]
        return float(draft + verify + context + self.overhead_ms)

    def fitted(
        self, depths: Sequence[int], max_num_reqs: int, max_num_tokens: int
    ) -> "StepCosts":
        """Return the part that an engine needs.

        Raises:
            ValueError: The tables do not cover it; the message completes "because".
        """
        missing = sorted(set(depths) - set(self.depths))
        if missing:
            raise ValueError(f"they lack draft depths {missing} of {list(depths)}")
        for name, covered, needed in (
            ("max_num_seqs", self.max_num_reqs, max_num_reqs),
            ("max_num_batched_tokens", self.max_num_tokens, max_num_tokens),
        ):
            if covered < needed:
                raise ValueError(f"they end at {name} {covered}, below {needed}")

        def cut(tables: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
            return {d: tables[d][: max_num_reqs + 1] for d in depths}

        return replace(
            self,
            draft_ms=cut(self.draft_ms),
            verify_uniform_ms=cut(self.verify_uniform_ms),
            verify_varlen_ms=self.verify_varlen_ms[: max_num_tokens + 1],
            verify_context_ms=cut(self.verify_context_ms),
            draft_context_ms=cut(self.draft_context_ms),
        )

    def sps_curve(
        self, depth: int | None = None, context_tokens: float = 0.0
    ) -> tuple[tuple[int, float], ...]:
        """Steps per second of the fixed path, for display and :func:`find_knee`.

        Args:
            depth: Enabled depth; None for the deepest.
            context_tokens: Mean context of the requests.

        Returns:
            ``(target tokens, steps/s)`` at request counts 1, 2, 4, ... and the largest.
        """
        depth = self.depths[-1] if depth is None else depth
        sizes = [1 << i for i in range(self.max_num_reqs.bit_length())]
        return tuple(
            (r * (depth + 1), 1000.0 / self.uniform_step_ms(depth, r, context_tokens))
            for r in sorted({*sizes, self.max_num_reqs} - {0})
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; extra top-level keys may be added by the caller."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "sps_curve": [list(point) for point in self.sps_curve()],
            **{
                name: {str(d): t.tolist() for d, t in getattr(self, name).items()}
                for name in _BY_DEPTH
            },
            "verify_varlen_ms": self.verify_varlen_ms.tolist(),
            "overhead_ms": self.overhead_ms,
            "whole_step": self.whole_step,
            "num_stalled_samples": self.num_stalled_samples,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StepCosts":
        """Rebuild from :meth:`to_json`; ``sps_curve`` and unknown keys are ignored.

        Context tables may be missing.

        Raises:
            ValueError: another schema or version, a missing key, a bad table.
        """
        found = None
        if isinstance(data, Mapping):
            found = (data.get("schema"), data.get("version"))
        if found != (SCHEMA, VERSION) or not is_int(found[1]):
            raise ValueError(
                f"cost file has schema, version = {found}, expected "
                f"{(SCHEMA, VERSION)}; {REPROFILE}."
            )
        try:
            return cls(
                **{
                    name: {
                        _depth(d): _numbers(f"{name}[{d}]", t)
                        for d, t in data[name].items()
                    }
                    for name in _BY_DEPTH
                    # A file from before context was priced: it costs nothing there.
                    if name in data or name not in _CONTEXT
                },
                verify_varlen_ms=_numbers("verify_varlen_ms", data["verify_varlen_ms"]),
                overhead_ms=read_number("overhead_ms", data["overhead_ms"], low=0.0),
                whole_step=read_choice("whole_step", data["whole_step"], (True, False)),
                num_stalled_samples=int(
                    read_number(
                        "num_stalled_samples", data["num_stalled_samples"], low=0.0
                    )
                ),
            )
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"cost file is damaged ({error!r}); {REPROFILE}.") from (
                error
            )


def check_sps_points(points: Sequence[Sequence[float]]) -> Points:
    """Check a steps-per-second curve and return it in milliseconds.

    Raises:
        ValueError: no points, token counts not rising integers > 0, rates not > 0.
    """
    checked: Points = []
    for point in points:
        tokens, rate = point if len(point) == 2 else (math.nan, math.nan)
        rising = tokens > (checked[-1][0] if checked else 0)
        if not (rising and tokens % 1 == 0 and 0.0 < rate < math.inf):
            raise ValueError(
                f"dspark_sps_curve has the point {list(point)} after {checked[-1:]}; "
                "points are [tokens, steps_per_s] with rising integer tokens > 0 and "
                "finite rates > 0."
            )
        checked.append((int(tokens), 1000.0 / rate))
    if not checked:
        raise ValueError(
            'dspark_sps_curve is empty; give points, "auto" or null (feature off).'
        )
    return checked
