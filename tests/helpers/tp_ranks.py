# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks that run the real capacity manager without a model.

``run_ranks`` starts two processes joined by gloo. Both see the same requests come and
go around the knee and the same drafts; rank 1's confidences drift. What each rank
planned and admitted in every step comes back for comparison.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
MAX_REQS = 10
NUM_DRAFTS = 7
KNEE = 4
PREFILL_TOKENS = 5
MAX_TOKENS = 128
# Steps over which the load rises, and then falls: across the knee each time.
PHASE_STEPS = 20
FAULT_STEP = 50
# (tokens, steps/s) around which budgets and depths of every size are best.
CURVE = [[8, 100.0], [24, 80.0], [40, 45.0], [80, 20.0]]
TIMEOUT_S = 240


@dataclass(frozen=True)
class Scenario:
    """One run of both ranks.

    Attributes:
        drift: What rank 1's own confidences look like beside rank 0's: ``none``,
            ``ulp``, ``large``, ``nan``, or ``mixed`` (another one every step).
        num_steps: Steps to run.
        fault: What goes wrong from step ``FAULT_STEP`` on: ``no_broadcast`` of rank
            0's confidences; ``host_view``: rank 1 plans with other survivals;
            ``device_view``: rank 1 ranks by other confidences;
            ``own_times``: each rank learns from its own step times, and publishes
            every step, as ranks that part do not agree on which; None: nothing.
        check: Level of VLLM_DSPARK_TP_CHECK.
        times: Whether steps are timed: rank 0's swing, rank 1's are short.
        keys: The ``dspark_*`` keys.
        steady: No request comes or goes once all slots are taken, and drafts are good.
    """

    drift: str = "mixed"
    num_steps: int = 100
    fault: str | None = None
    check: int = 0
    times: bool = False
    keys: dict[str, Any] = field(default_factory=lambda: {"dspark_sps_curve": CURVE})
    steady: bool = False


@dataclass(frozen=True)
class RankTrace:
    """What one rank did in one scenario.

    Attributes:
        plans: Per step: active, draft_budget, num_tokens, next_depth; -1 is None.
        capacities: Per step, -1 where nothing was ranked. Shape [steps, MAX_REQS].
        num_drifted: Steps in which this rank's confidences were changed.
        num_nan_rows: Rows that the mirror saw with a NaN.
        error: Type and message of what the manager raised; None if nothing.
        num_factors: Cost factors that measured times have moved.
        published: Per step: whether the plan says so.
    """

    plans: list[list[int]]
    capacities: list[list[int]]
    num_drifted: int
    num_nan_rows: int
    error: str | None
    num_factors: int = 0
    published: list[bool] = field(default_factory=list)


def measured_keys() -> dict[str, Any]:
    """Return keys with full cost tables, which serving corrects."""
    depths, reqs = (1, 2, 3, 5, 7), np.arange(MAX_REQS + 1)
    document = {
        "schema": "vllm-dspark-sps-curve",
        "version": 1,
        "sps_curve": CURVE,
        "draft_ms": {str(d): (0.1 * d * reqs).tolist() for d in depths},
        "verify_uniform_ms": {
            str(d): (8.0 + 0.3 * reqs * (d + 1)).tolist() for d in depths
        },
        "verify_context_ms": {},
        "draft_context_ms": {},
        "verify_varlen_ms": (8.0 + 0.3 * np.arange(MAX_TOKENS + 1)).tolist(),
        "overhead_ms": 0.0,
        "whole_step": False,
        "num_stalled_samples": 0,
    }
    return {"dspark_sps_curve": document}


def run_ranks(
    scenarios: Sequence[Scenario], temp_dir: Path
) -> list[tuple[RankTrace, ...]]:
    """Run scenarios one after the other on one pair of processes.

    Args:
        scenarios: What to run.
        temp_dir: TMPDIR of the ranks; dumps go there.

    Returns:
        Per scenario the traces, one a rank.
    """
    with tempfile.TemporaryDirectory(prefix="dspark-ranks-") as folder:
        spec = Path(folder, "spec.json")
        spec.write_text(json.dumps([asdict(s) for s in scenarios]))
        path = [str(REPOSITORY), os.environ.get("PYTHONPATH")]
        # Other tests of this process may have switched the rehearsal on, whose
        # variables would ask these ranks for a Triton that is off here.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        environment = {
            **clean,
            # Admission by its reference: the interpreter takes 25 ms a launch, and
            # engine runs rehearse the kernel.
            "VLLM_DSPARK_CPU_REHEARSAL": "0",
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temp_dir),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--folder", folder, "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(NUM_RANKS)
        ]
        try:
            logs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for rank, log in zip(ranks, logs, strict=True):
            assert rank.returncode == 0, log[-4000:]
        traces = [
            json.loads(Path(folder, f"rank{rank}.json").read_text())
            for rank in range(NUM_RANKS)
        ]
    return [
        tuple(RankTrace(**trace) for trace in of_ranks)
        for of_ranks in zip(*traces, strict=True)
    ]


# ---- a rank --------------------------------------------------------------------


class Workload:
    """Requests that come and go, in steps that both ranks see alike.

    Args:
        seed: Of everything random.
        steady: Nobody comes or goes once all slots are taken.
    """

    def __init__(self, seed: int, *, steady: bool = False):
        self.steady = steady
        self.random = np.random.default_rng(seed)
        self.decoding: list[int] = []
        self.new: list[int] = []
        self.num_steps = 0

    def next_batch(self, depth: int) -> SimpleNamespace:
        """Let requests come and go, and return the batch, decodes first.

        Args:
            depth: Drafts in hand of each decoding request.
        """
        self.decoding += self.new
        self.num_steps += 1
        rising = self.num_steps % (2 * PHASE_STEPS) < PHASE_STEPS
        arrival, departure = (0.7, 0.1) if rising else (0.05, 0.7)
        if self.steady:
            arrival, departure = 1.0, 0.0
        if len(self.decoding) > 1 and self.random.random() < departure:
            self.decoding.pop(self.random.integers(len(self.decoding)))
        free = sorted(set(range(MAX_REQS)) - set(self.decoding))
        arrives = free and (self.random.random() < arrival or not self.decoding)
        self.new = free[:1] if arrives else []
        slots = np.array(self.decoding + self.new, dtype=np.int64)
        is_new = np.isin(slots, self.new)
        drafts = np.where(is_new, 0, depth).astype(np.int32)
        scheduled = np.where(is_new, PREFILL_TOKENS, drafts + 1).astype(np.int32)
        return SimpleNamespace(
            req_ids=[str(slot) for slot in slots],
            num_scheduled_tokens=scheduled,
            num_tokens=int(scheduled.sum()),
            num_draft_tokens_np=drafts if drafts.any() else None,
            idx_mapping_np=slots,
            prefill_len_np=np.full(len(slots), PREFILL_TOKENS, dtype=np.int32),
            num_computed_prefill_tokens_np=np.where(is_new, 0, PREFILL_TOKENS),
            is_prefilling_np=is_new,
        )

    def confidences(self) -> np.ndarray:
        """Return rank 0's confidences of a step, coarse so that many tie."""
        lowest = 7 if self.steady else 3
        eighths = self.random.integers(lowest, 9, size=(MAX_REQS, NUM_DRAFTS))
        return (eighths / 8).astype(np.float32)


class Drift:
    """Changes one rank's confidences. Per step: ``apply``.

    Args:
        kind: As ``Scenario.drift``.
    """

    KINDS = ("ulp", "large", "nan")

    def __init__(self, kind: str):
        self.kind = kind
        self.random = np.random.default_rng(7)
        self.num_applied = 0

    def apply(self, probs: np.ndarray) -> None:
        """Change ``probs`` in place."""
        if self.kind == "none":
            return
        kind = self.kind
        if kind == "mixed":
            kind = self.KINDS[self.num_applied % len(self.KINDS)]
        self.num_applied += 1
        up = self.random.random(probs.shape) < 0.5
        if kind == "ulp":
            probs[:] = np.nextafter(probs, np.where(up, 2, 0).astype(np.float32))
        elif kind == "large":
            probs[:] = np.where(up, 0.0, 1.0)
        else:
            probs[up] = np.nan


def _make_manager(scenario: Scenario) -> Any:
    import torch

    import vllm.v1.worker.cpu.shm  # noqa: F401  (torch.cuda names on a CPU)

    # Its placeholders of events have no clock.
    torch.cuda.Event.elapsed_time = lambda self, end: 1.0
    from vllm.config.dspark_capacity import DSparkCapacityConfig
    from vllm.config.dspark_environ import DSparkCapacityEnv
    from vllm.v1.worker.gpu.spec_decode.capacity import VarlenCapacityManager

    env = DSparkCapacityEnv(activation_batch_size=KNEE, tp_check=scenario.check)
    manager = VarlenCapacityManager(
        DSparkCapacityConfig.from_keys(scenario.keys),
        env,
        query_start_loc=torch.zeros(MAX_REQS + 1, dtype=torch.int32),
        reports_admitted_counts=False,
        req_states=SimpleNamespace(
            max_num_reqs=MAX_REQS,
            device=torch.device("cpu"),
            num_speculative_steps=NUM_DRAFTS,
            max_num_batched_tokens=MAX_TOKENS,
            num_computed_tokens_np=np.zeros(MAX_REQS, dtype=np.int32),
        ),
        num_bonus_tokens=1,
        max_total_logits=128,
    )
    manager.finish_start_up()
    return manager


def _break(manager: Any, fault: str, rank: int) -> None:
    if fault == "own_times":
        manager.planner.corrector.times._group = SimpleNamespace(world_size=1)
        manager.planner.cadence._enabled = False
    if fault == "no_broadcast":
        # Of the manager only: the check keeps the real group.
        manager._tp_group = SimpleNamespace(
            world_size=NUM_RANKS, broadcast=lambda *args, **kwargs: None
        )
    if rank == 0:
        return
    mirror = manager.mirror
    if fault == "host_view":
        survival_probs = mirror.survival_probs
        mirror.survival_probs = lambda slots: survival_probs(slots) ** 2
    elif fault == "device_view":
        publish = mirror.publish

        def publish_and_change(*args: Any) -> None:
            publish(*args)
            mirror.probs.copy_(1.0 - mirror.probs)

        mirror.publish = publish_and_change


def _time_steps(manager: Any, rank: int) -> None:
    """Replace the measured times of a rank; placeholders of events have no clock."""
    times = manager.planner.corrector.times

    def add(serial: int, _: float) -> None:
        times.add(serial, 30.0 + 20.0 * np.sin(serial / 40) if rank == 0 else 9.0)

    manager.mirror.on_step_time = add


def _step(manager: Any, work: Workload, drift: Drift, depth: int) -> tuple[Any, list]:
    import torch

    batch = work.next_batch(depth)
    for slot in work.new:
        manager.add_request(slot)
    plan = manager.plan_step(batch)
    slots = torch.from_numpy(batch.idx_mapping_np)
    admitted = [-1] * MAX_REQS
    if plan.trims:
        manager.reallocate_drafts(batch.req_ids, slots)
        capacities = manager.capacities[: len(slots)].tolist()
        admitted[: len(slots)] = capacities
    probs = work.confidences()
    drift.apply(probs)
    num_reqs = len(slots)
    drafted = SimpleNamespace(
        num_reqs=num_reqs, idx_mapping=slots, idx_mapping_np=batch.idx_mapping_np
    )
    next_depth = NUM_DRAFTS if plan.next_depth is None else plan.next_depth
    manager.finish_step(torch.from_numpy(probs), drafted, next_depth)
    return plan, admitted


def _run(scenario: Scenario, rank: int) -> RankTrace:
    manager = _make_manager(scenario)
    if scenario.times:
        _time_steps(manager, rank)
    work = Workload(seed=0, steady=scenario.steady)
    drift = Drift(scenario.drift if rank == 1 else "none")
    plans: list[list[int]] = []
    capacities: list[list[int]] = []
    published: list[bool] = []
    depth, error = NUM_DRAFTS, None
    try:
        for step in range(1, scenario.num_steps + 1):
            if scenario.fault and step == FAULT_STEP:
                _break(manager, scenario.fault, rank)
            plan, admitted = _step(manager, work, drift, depth)
            depth = NUM_DRAFTS if plan.next_depth is None else plan.next_depth
            values = plan.active, plan.draft_budget, plan.num_tokens, plan.next_depth
            plans.append([-1 if value is None else int(value) for value in values])
            capacities.append(admitted)
            published.append(plan.publishes)
    except RuntimeError as e:
        error = f"{type(e).__name__}: {e}"
    nan_rows = manager.mirror.num_nan_rows
    moved = 0
    if manager.planner.corrector is not None:
        correction = manager.planner.corrector.correction
        rows = [*correction.uniform.values(), *correction.varlen.values()]
        moved = int(sum((row != 1.0).sum() for row in rows))
    return RankTrace(
        plans, capacities, drift.num_applied, nan_rows, error, moved, published
    )


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    args = parser.parse_args()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            NUM_RANKS,
            args.rank,
            f"file://{args.folder}/rendezvous",
            args.rank,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(NUM_RANKS)
    specs = json.loads(Path(args.folder, "spec.json").read_text())
    traces = [asdict(_run(Scenario(**spec), args.rank)) for spec in specs]
    Path(args.folder, f"rank{args.rank}.json").write_text(json.dumps(traces))
    parallel_state.cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
