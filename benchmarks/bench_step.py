# SPDX-License-Identifier: Apache-2.0
"""How much host time does capacity add to an active step, caches cold and hot?

    python benchmarks/bench_step.py [--out step.jsonl]

Drives the real capacity manager (planner, confidence mirror, step corrector) on CPU
tensors through steps at or above the knee, part by part: ``plan_step``, in trimmed
steps ``trim`` (``compact_batch``, ``reallocate_drafts`` and the copy of the report),
and ``finish_step``. Cases:
  * ``all``: flat costs, every plan verifies everything;
  * ``trims``: half of the requests are hopeless, every plan trims.

Cold: before each part a few milliseconds of other Python, NumPy and torch work and a
sweep over memory run, as a step of an engine does between the parts. Hot: nothing
runs between them.

Streams and events are placeholders and the admission kernel is left out (its checks
are in), so what CUDA's runtime adds is missing from the times. It is counted instead,
in a pass of its own: Python and C function calls (NumPy's operators and ufuncs are
none), torch operators, and calls of streams and events.
"""

import argparse
import ast
import contextlib
import difflib
import inspect
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from vllm.config.dspark_capacity import (
    DSparkCapacityConfig,
    DSparkCapacityEnv,
    default_draft_depths,
)
from vllm.v1.worker.gpu.dspark_capacity_model_runner import DSparkCapacityModelRunner
from vllm.v1.worker.gpu.spec_decode import capacity
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_checks import check_admission
from vllm.v1.worker.gpu.spec_decode.dspark.step_corrector import StepCorrector
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.step_times import StepTimes

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.arguments import output_file, positive_int, seed_number  # noqa: E402
from benchmarks.common import Record, append_records, print_table  # noqa: E402
from benchmarks.simulator.ours import RecordedCosts  # noqa: E402

PARTS = ("plan_step", "trim", "finish_step")
# Depth plans come every so many steps; a mean over them holds one.
PERIOD = 8
# Steps before anything is timed: the plans have settled by then.
WARMUP = 10 * PERIOD
# Milliseconds a target token, by case.
TOKEN_MS = {"all": 1e-5, "trims": 0.01}
EVICTED_BYTES = 32 << 20

Costs = dict[str, float]


class CudaCalls:
    """Placeholders for CUDA streams and events that count what is called.

    Attributes:
        count: Calls so far.
        step_ms: Time between any two events.
    """

    def __init__(self) -> None:
        self.count, self.step_ms = 0, 1.0
        calls = self

        class Placeholder:
            def __init__(self, *_: object, **__: object):
                self.device = torch.device("cpu")

            def _called(self, *_: object) -> None:
                calls.count += 1

            record = synchronize = wait = wait_event = wait_stream = _called

            def elapsed_time(self, _: object) -> float:
                calls.count += 1
                return calls.step_ms

        self._placeholder = Placeholder

    def called(self, *_: object) -> Any:
        """Stand in for ``torch.cuda.current_stream`` and ``set_stream``."""
        self.count += 1
        return self._placeholder()

    def patches(self) -> contextlib.ExitStack:
        """Return the patches, in force until the stack is closed."""
        stack = contextlib.ExitStack()
        for name, value in (
            ("Stream", self._placeholder),
            ("Event", self._placeholder),
            ("current_stream", self.called),
            ("set_stream", self.called),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        return stack


class OtherWork:
    """What an engine does between the parts of capacity: evicts what they use."""

    def __init__(self) -> None:
        self._memory = np.zeros(EVICTED_BYTES // 8)
        self._source = inspect.getsource(difflib.Differ)
        self._tensor = torch.arange(4096)
        self._tree = {f"k{i}": {"v": list(range(i % 9))} for i in range(150)}

    def __call__(self) -> None:
        """Run for a few milliseconds."""
        self._memory += 1.0
        tree = ast.parse(self._source)
        names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
        json.loads(json.dumps(self._tree))
        difflib.SequenceMatcher(None, names[:60], names[60:120]).ratio()
        table = np.linalg.solve(np.eye(8) * 3.0, np.ones(8))
        np.sort(np.tile(table, 40)).reshape(8, -1).mean(axis=1)
        (self._tensor.view(64, 64).float() @ torch.ones(64, 1)).softmax(0).argmax()


class Step:
    """One engine's steps, always with the same batch. Per step: the parts in order.

    Args:
        case: ``all`` or ``trims``.
        num_reqs: Requests R, all decoding.
        k: Logical depth K, and the drafts in hand of every request.
        seed: Of confidences and slots.
    """

    def __init__(self, case: str, num_reqs: int, k: int, seed: int):
        self._case, self._k = case, k
        rng = np.random.default_rng(seed)
        slots = rng.permutation(num_reqs)
        costs = _make_costs(num_reqs, k, TOKEN_MS[case])
        self._manager = _make_manager(costs)
        self.tabled_ms = costs.uniform_step_ms(k, num_reqs)
        low = np.where(np.arange(num_reqs) % 2, 0.05, 0.9) if case == "trims" else 0.9
        noise = rng.uniform(0.0, 0.05, (num_reqs, k))
        probs = noise + np.broadcast_to(low, (k, num_reqs)).T
        self._probs = torch.from_numpy(probs.astype(np.float32))
        ones, drafts = np.ones(num_reqs, np.int32), np.full(num_reqs, k, np.int32)
        self._batch = SimpleNamespace(
            req_ids=[f"request-{i}" for i in range(num_reqs)],
            num_scheduled_tokens=drafts + 1,
            num_tokens=num_reqs * (k + 1),
            num_draft_tokens_np=drafts,
            idx_mapping_np=slots,
            prefill_len_np=ones,
            num_computed_prefill_tokens_np=ones,
            is_prefilling_np=np.zeros(num_reqs, dtype=bool),
            has_prefill=False,
        )
        self._input_batch = SimpleNamespace(
            num_reqs=num_reqs,
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            is_prefilling_np=self._batch.is_prefilling_np,
        )
        self._cu_num_logits = np.arange(num_reqs + 1, dtype=np.int32) * (k + 1)
        # What the runner's _start_report_copy needs.
        self._runner: Any = SimpleNamespace(
            capacity=self._manager, _report_buffers=_report_buffers(num_reqs)
        )

    def plan_step(self) -> None:
        self._plan = self._manager.plan_step(self._batch)

    def trim(self) -> None:
        if not self._plan.trims:
            return
        manager, batch = self._manager, self._batch
        manager.compact_batch(
            batch.num_draft_tokens_np, batch.num_scheduled_tokens, self._cu_num_logits
        )
        manager.reallocate_drafts(batch.req_ids, self._input_batch.idx_mapping)
        DSparkCapacityModelRunner._start_report_copy(self._runner)

    def finish_step(self) -> None:
        self._manager.finish_step(self._probs, self._input_batch, self._k)

    def run(self) -> None:
        """Run all parts."""
        for part in PARTS:
            getattr(self, part)()

    def check(self) -> None:
        """Raise unless the step did what its case says."""
        if not self._plan.active or self._plan.trims != (self._case == "trims"):
            raise RuntimeError(f"case {self._case!r} planned {self._plan}")


def _make_costs(num_reqs: int, k: int, token_ms: float) -> StepCosts:
    reqs = np.arange(num_reqs + 1)
    depths = default_draft_depths(k)
    return StepCosts(
        {d: 1.0 + 1e-6 * d * reqs for d in depths},
        {d: 6.0 + token_ms * reqs * (d + 1) for d in depths},
        6.0 + token_ms * np.arange(num_reqs * (k + 1) + 1),
    )


def _make_manager(costs: StepCosts) -> capacity.VarlenCapacityManager:
    num_reqs, k = costs.max_num_reqs, costs.depths[-1]
    device, group = torch.device("cpu"), SimpleNamespace(world_size=1, rank_in_group=0)
    states: Any = SimpleNamespace(
        max_num_reqs=num_reqs,
        num_speculative_steps=k,
        max_num_batched_tokens=costs.max_num_tokens,
        device=device,
        num_computed_tokens_np=np.full(num_reqs, 500, dtype=np.int32),
    )
    keys = {"dspark_sps_curve": "auto", "dspark_draft_depths": list(costs.depths)}
    with mock.patch.object(capacity, "get_tp_group", lambda: group):
        manager = capacity.VarlenCapacityManager(
            DSparkCapacityConfig.from_keys(keys, num_speculative_tokens=k),
            DSparkCapacityEnv(),
            req_states=states,
            query_start_loc=torch.zeros(num_reqs + 1, dtype=torch.int32),
            reports_admitted_counts=True,
            num_bonus_tokens=1,
            max_total_logits=10**9,
        )
    times: Any = StepTimes(group, device)
    manager.planner.costs = RecordedCosts(costs, 1)
    manager.planner.corrector = StepCorrector(costs, times)
    manager.mirror.on_step_time = times.add
    manager._admit_drafts = _check_only
    return manager


def _check_only(probs: Any, *inputs: Any, **options: Any) -> None:
    """``admit_drafts`` without its launch."""
    *tensors, budget = inputs
    outputs = tuple(v for name, v in options.items() if name.endswith("_out"))
    check_admission(
        probs, tuple(tensors), outputs, budget, options["num_bonus_tokens"], 0.0
    )


def _report_buffers(num_reqs: int) -> Any:
    return deque(torch.zeros(num_reqs, dtype=torch.int32) for _ in range(4))


def time_parts(step: Step, between: Callable[[], None]) -> Costs:
    """Run one step; return the microseconds of each part."""
    took = {}
    for part in PARTS:
        call = getattr(step, part)
        between()
        start = time.perf_counter_ns()
        call()
        took[part] = (time.perf_counter_ns() - start) / 1000.0
    step.check()
    return took


class _TorchOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_calls(counts: Costs) -> Iterator[None]:
    """Count Python and C function calls into ``counts['calls']``."""
    counts["calls"] = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            counts["calls"] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def count_step(step: Step, cuda: CudaCalls, kind: str) -> float:
    """Run one step; return its calls, torch operators or CUDA calls."""
    before, counts = cuda.count, {"calls": 0.0}
    operators = _TorchOperators()
    counting: Any = contextlib.nullcontext()
    if kind != "CUDA calls":
        counting = operators if kind == "torch operators" else counted_calls(counts)
    with counting:
        step.run()
    step.check()
    if kind == "CUDA calls":
        return float(cuda.count - before)
    return float(operators.count if kind == "torch operators" else counts["calls"])


def measure(
    case: str, num_reqs: int, k: int, args: argparse.Namespace, cuda: CudaCalls
) -> list[Record]:
    """Return the records of one case, cold and hot, then the counts."""
    records = []

    def add(arm: str, metric: str, unit: str, samples: list[float]) -> None:
        where = {"step": case, "R": num_reqs, "K": k}
        records.append(
            Record("step", where, arm, metric, unit, samples, seed=args.seed)
        )

    for caches, between in (("cold", OtherWork()), ("hot", lambda: None)):
        step = Step(case, num_reqs, k, args.seed)
        cuda.step_ms = step.tabled_ms
        for _ in range(WARMUP):
            step.run()
        steps = [time_parts(step, between) for _ in range(args.periods * PERIOD)]
        for part in PARTS:
            add(part, f"{caches}, one step", "us", [took[part] for took in steps])
        sums = [sum(took.values()) for took in steps]
        add("all parts", f"{caches}, one step", "us", sums)
        means = [
            statistics.fmean(sums[i : i + PERIOD]) for i in range(0, len(sums), PERIOD)
        ]
        add("all parts", f"{caches}, mean of {PERIOD} steps", "us", means)
    for kind in ("calls", "torch operators", "CUDA calls"):
        counts = [count_step(step, cuda, kind) for _ in range(4 * PERIOD)]
        add("all parts", f"{kind} of a step", "1", counts)
        add("all parts", f"{kind}, mean", "1", [statistics.fmean(counts)])
    return records


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        description="Host time that capacity adds to an active step."
    )
    parser.add_argument("-o", "--out", type=output_file, help="append JSON lines here")
    add = parser.add_argument
    add("--num-reqs", type=positive_int, nargs="+", default=[32, 256])
    add("--depth", type=positive_int, default=7, help="logical depth K")
    add("--periods", type=positive_int, default=12, help=f"of {PERIOD} steps each")
    add("--seed", type=seed_number, default=0)
    return parser.parse_args(argv)


def main() -> None:
    """Run the cases, print the table and write the records."""
    args = parse_args()
    torch.set_num_threads(1)
    records: list[Record] = []
    cuda = CudaCalls()
    # A single request is not hopeless: nothing would be trimmed.
    cases = [(c, r) for c in TOKEN_MS for r in args.num_reqs if c == "all" or r > 1]
    with cuda.patches():
        for case, num_reqs in tqdm(cases, file=sys.stderr):
            new = measure(case, num_reqs, args.depth, args, cuda)
            if args.out:
                append_records(args.out, new)
            records += new
    print_table(records, title="Host time of capacity in an active step: median (IQR)")


if __name__ == "__main__":
    main()
