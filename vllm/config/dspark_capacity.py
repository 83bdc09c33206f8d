# SPDX-License-Identifier: Apache-2.0
"""The user's choices for load-aware DSpark capacity, checked.

Pure: standard library only (plus the readers beside it). Keys arrive inside
``--speculative-config``, switches for operation and debugging as
``VLLM_DSPARK_*`` environment variables.

Invariants (pinned by tests/config/test_dspark_capacity.py):
  * The feature is on iff a curve is given, the threshold is > 0 or the budget
    fraction is < 1; keys at their defaults leave it off.
  * At most one of the three selects the mode; every other combination, and any
    option that would have no effect, is an error.
  * Objects are immutable and equal after pickling.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from vllm.config.dspark_calibration import CALIBRATION_KEY, ConfidenceCalibration
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.config.dspark_values import (
    DSparkCapacityConfigError,
    SpsCurveInput,
    bad_value,
    is_int,
    load_sps_curve,
    read_choice,
    read_directory,
    read_number,
    read_sps_curve,
    unknown_name,
)

__all__ = [
    "DSPARK_KEYS",
    "DSparkCapacityConfig",
    "DSparkCapacityConfigError",
    "DSparkCapacityEnv",
    "SpsCurveInput",
    "default_draft_depths",
    "load_sps_curve",
]

CapacityMode = Literal["threshold", "fraction", "curve"]
# Keys of upstream that share our prefix.
UPSTREAM_DSPARK_KEYS = frozenset({"dspark_draft_topk"})


@dataclass(frozen=True)
class DSparkCapacityConfig:
    """Checked ``dspark_*`` keys. Build it with :meth:`from_keys`."""

    dspark_sps_curve: Literal["auto"] | SpsCurveInput | None = None
    """Engine speed by load; selects curve mode, which plans depth and budget for
    the most tokens per second. "auto" measures it at start; a JSON file or
    [[tokens, steps_per_s], ...] gives it. None: no curve."""
    dspark_confidence_threshold: float = 0.0
    """In [0, 1]. Above 0: verify drafts whose survival probability is at least
    this. 0: off."""
    dspark_budget_frac: float = 1.0
    """In [0, 1]. Below 1: verify the best ceil(requests * K * fraction) drafts of
    the batch (0: none). 1: off."""
    dspark_capacity_verification_mode: Literal["varlen", "mask"] = "varlen"
    """"varlen" leaves rejected slots out of the verify batch, which saves target
    compute; "mask" keeps the batch shape and ignores them."""
    dspark_confidence_temperature: float = 1.0
    """In [0.01, 100]. Divides every confidence logit; with online STS, where its
    temperatures start. 1: confidences as trained."""
    dspark_online_sts: bool | None = None
    """Fit confidence temperatures (and shifts) per position while serving. None: on
    with dspark_sps_curve "auto", else off. A curve file may hold the start values in
    its section "confidence_calibration", which apply with STS off as well."""
    dspark_sps_overhead_ms: float = 0.0
    """Milliseconds >= 0 added to every step of the curve. 0: none."""
    dspark_draft_depths: tuple[int, ...] | None = None
    """Draft depths that may be used, each in [0, K] and K among them; more depths
    cost start-up time and graph memory. Only curve mode chooses among several.
    None: see default_draft_depths."""
    dspark_sps_cache: str = "off"
    """Directory that keeps measured costs between starts, a file for each
    configuration. "off": measure at every start."""

    @classmethod
    def from_keys(
        cls, keys: Mapping[str, Any], *, num_speculative_tokens: int | None = None
    ) -> "DSparkCapacityConfig":
        """Check raw keys.

        Args:
            keys: ``dspark_*`` entries of the speculative config, as decoded JSON.
                Upstream's own dspark keys are passed over.
            num_speculative_tokens: K, for the bounds of dspark_draft_depths; None
                while K is not known yet.

        Returns:
            The configuration; a curve file has been read.

        Raises:
            DSparkCapacityConfigError: Unknown key, bad value, or keys that
                exclude each other.
        """
        values: dict[str, Any] = {}
        for name, value in keys.items():
            if name in UPSTREAM_DSPARK_KEYS:
                continue
            if name not in _READERS:
                raise unknown_name(name, _READERS, what="speculative_config key")
            values[name] = _READERS[name](name, value)
        made = cls(**values)
        made._check_mode()
        made._check_options()
        if num_speculative_tokens is not None:
            made.check_depths(num_speculative_tokens)
            made.start_calibration(num_speculative_tokens)
        return made

    @property
    def mode(self) -> CapacityMode | None:
        """What decides how many drafts are verified; None when switched off."""
        if self.dspark_confidence_threshold > 0.0:
            return "threshold"
        if self.dspark_budget_frac < 1.0:
            return "fraction"
        return None if self.dspark_sps_curve is None else "curve"

    @property
    def enabled(self) -> bool:
        """Whether any mode is selected."""
        return self.mode is not None

    @property
    def use_online_sts(self) -> bool:
        """Whether confidences are calibrated while serving."""
        if self.dspark_online_sts is None:
            return self.dspark_sps_curve == "auto"
        return self.enabled and self.dspark_online_sts

    @property
    def saved_calibration(self) -> ConfidenceCalibration | None:
        """The calibration that came with the curve, if any.

        Raises:
            DSparkCapacityConfigError: The section is malformed.
        """
        curve = self.dspark_sps_curve
        if not isinstance(curve, SpsCurveInput) or curve.document is None:
            return None
        section = curve.document.get(CALIBRATION_KEY)
        return None if section is None else ConfidenceCalibration.from_json(section)

    def start_calibration(
        self, num_speculative_tokens: int
    ) -> ConfidenceCalibration | None:
        """Return what is applied to confidences from the first step on.

        Args:
            num_speculative_tokens: K, >= 1.

        Returns:
            None where they are used as the draft reports them.

        Raises:
            DSparkCapacityConfigError: The saved one is malformed or for fewer
                positions.
        """
        saved = self.saved_calibration
        if saved is not None:
            return saved.first(num_speculative_tokens)
        temperature = self.dspark_confidence_temperature
        if temperature == 1.0 and not self.use_online_sts:
            return None
        return ConfidenceCalibration.uniform(num_speculative_tokens, temperature)

    def to_keys(self) -> dict[str, Any]:
        """Return keys that give an equal object through :meth:`from_keys`.

        A curve that came from a file is returned as its content.
        """
        keys = {f.name: getattr(self, f.name) for f in fields(self)}
        if isinstance(self.dspark_sps_curve, SpsCurveInput):
            keys["dspark_sps_curve"] = self.dspark_sps_curve.to_json_value()
        if self.dspark_draft_depths is not None:
            keys["dspark_draft_depths"] = list(self.dspark_draft_depths)
        return keys

    def resolve_depths(
        self, num_speculative_tokens: int, env: DSparkCapacityEnv | None = None
    ) -> tuple[int, ...]:
        """Return the draft depths that may be used, increasing, K last.

        Args:
            num_speculative_tokens: K, >= 1.
            env: Switches; None reads the environment of this process.

        Raises:
            DSparkCapacityConfigError: The list, K and the environment disagree.
        """
        env = DSparkCapacityEnv.from_environ(os.environ) if env is None else env
        env.check_min_depth(num_speculative_tokens)
        if self.dspark_draft_depths is None:
            # Only cost curves can tell depths apart; each would cost its own graphs.
            if self.mode != "curve" or not env.dynamic_draft_depth:
                return (num_speculative_tokens,)
            return default_draft_depths(num_speculative_tokens, env.min_draft_depth)
        self.check_depths(num_speculative_tokens)
        env.check_agrees_with(self.dspark_draft_depths)
        return self.dspark_draft_depths

    def check_depths(self, num_speculative_tokens: int) -> None:
        """Check dspark_draft_depths against K.

        Raises:
            DSparkCapacityConfigError: A depth exceeds K, or K is missing.
        """
        depths, k = self.dspark_draft_depths, num_speculative_tokens
        if depths is not None and depths[-1] != k:
            raise bad_value(
                "dspark_draft_depths",
                list(depths),
                allowed=(
                    f"a list of integers in [0, {k}] that contains "
                    f"num_speculative_tokens = {k}"
                ),
                way_out=f"Add {k}, drop larger depths, or leave the key out",
            )

    def _check_mode(self) -> None:
        given = {
            "dspark_confidence_threshold": self.dspark_confidence_threshold > 0.0,
            "dspark_budget_frac": self.dspark_budget_frac < 1.0,
            "dspark_sps_curve": self.dspark_sps_curve is not None,
        }
        chosen = [name for name, is_given in given.items() if is_given]
        if len(chosen) > 1:
            raise DSparkCapacityConfigError(
                f"{' and '.join(f'{n}={_shown(self, n)}' for n in chosen)} exclude "
                "each other: exactly one of threshold > 0, fraction < 1 and a curve "
                "decides what is verified. Keep one of them; "
                '"dspark_sps_curve": "auto" suits most uses.'
            )

    def _check_options(self) -> None:
        """Refuse an option that nothing would read."""
        if not self.enabled:
            for f in fields(self):
                value = getattr(self, f.name)
                # Switching calibration off is true of a feature that is off.
                if value != f.default and value is not False:
                    raise self._no_effect(
                        f.name,
                        "the capacity feature is off",
                        'add "dspark_sps_curve": "auto", '
                        "dspark_confidence_threshold > 0 or dspark_budget_frac < 1",
                    )
        if self.mode != "curve" and self.dspark_sps_overhead_ms:
            raise self._no_effect(
                "dspark_sps_overhead_ms",
                f"{self.mode} mode has no curve",
                'use "dspark_sps_curve"',
            )
        if self.mode in ("threshold", "fraction") and self._num_depths > 1:
            raise self._no_effect(
                "dspark_draft_depths",
                f"{self.mode} mode has no costs to choose a depth by and drafts K",
                'list K alone, or use "dspark_sps_curve"',
            )
        if self.dspark_sps_curve != "auto" and self.dspark_sps_cache != "off":
            raise self._no_effect(
                "dspark_sps_cache",
                "only measured curves are kept",
                'use "dspark_sps_curve": "auto"',
            )
        if (
            self.saved_calibration is not None
            and self.dspark_confidence_temperature != 1.0
        ):
            raise self._no_effect(
                "dspark_confidence_temperature",
                f"the curve has its own {CALIBRATION_KEY}",
                f"remove {CALIBRATION_KEY} from the curve",
            )

    @property
    def _num_depths(self) -> int:
        return len(self.dspark_draft_depths or ())

    def _no_effect(
        self, name: str, why: str, way_out: str
    ) -> DSparkCapacityConfigError:
        return DSparkCapacityConfigError(
            f"{name}={_shown(self, name)} would have no effect: {why}. Allowed here: "
            f"its default, {_DEFAULTS[name]!r}. Leave the key out or {way_out}."
        )


def default_draft_depths(
    num_speculative_tokens: int, min_draft_depth: int = 1
) -> tuple[int, ...]:
    """Return the depths that are enabled when none are listed.

    Dense where the best depth moves with the load (1, 3, 5, 8, 12, 18, ...), always
    with the smallest allowed depth and K. Each costs one set of graphs; what leaving
    depth 2 out costs, 0.2 % of throughput on average, is in docs/simulator.md.

    Args:
        num_speculative_tokens: K, >= 1.
        min_draft_depth: Smallest depth in [0, K]; 0 allows steps without drafts.

    Returns:
        Increasing depths, K last: ``(1, 3, 5, 7)`` for K = 7.
    """
    depths = {min_draft_depth, num_speculative_tokens}
    depth = 1
    while depth < num_speculative_tokens:
        if depth > min_draft_depth:
            depths.add(depth)
        depth += max(2, (depth + 1) // 2)
    return tuple(sorted(depths))


def _shown(config: DSparkCapacityConfig, name: str) -> str:
    value = getattr(config, name)
    if isinstance(value, SpsCurveInput):
        return f"<curve of {len(value.points)} points, {value.origin}>"
    return repr(list(value) if isinstance(value, tuple) else value)


def _read_curve(name: str, value: Any) -> Any:
    if value is None or isinstance(value, SpsCurveInput):
        return value
    if value == "auto":
        return value
    if isinstance(value, (str, os.PathLike)):
        return load_sps_curve(value)
    return read_sps_curve(value)


def _read_depths(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if not is_list or not all(is_int(d) and d >= 0 for d in value):
        raise bad_value(
            name,
            value,
            allowed="null or a non-empty list of integers in [0, K]",
            way_out="Correct the list, for example [1, 3, 7], or leave the key out",
        )
    return tuple(sorted(set(value)))


_READERS = {
    "dspark_sps_curve": _read_curve,
    "dspark_confidence_threshold": lambda n, v: read_number(n, v, low=0, high=1),
    "dspark_budget_frac": lambda n, v: read_number(n, v, low=0, high=1),
    "dspark_capacity_verification_mode": lambda n, v: read_choice(
        n, v, ("varlen", "mask")
    ),
    # Beyond these bounds every confidence is 0, 0.5 or 1 in float32.
    "dspark_confidence_temperature": lambda n, v: read_number(n, v, low=0.01, high=100),
    "dspark_online_sts": lambda n, v: read_choice(n, v, (None, True, False)),
    # An hour a step: beyond any use, and sums with it stay finite.
    "dspark_sps_overhead_ms": lambda n, v: read_number(n, v, low=0, high=3.6e6),
    "dspark_draft_depths": _read_depths,
    "dspark_sps_cache": lambda n, v: read_directory(n, v, off="off"),
}
_DEFAULTS = {f.name: f.default for f in fields(DSparkCapacityConfig)}
DSPARK_KEYS: tuple[str, ...] = tuple(_DEFAULTS)
