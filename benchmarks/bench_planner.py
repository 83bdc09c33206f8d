# SPDX-License-Identifier: Apache-2.0
"""How much host time does one plan take, next to upstream's?

    python benchmarks/bench_planner.py [--out planner.jsonl]

Arms (one thread, no GPU needed):
  * ``plan_budget``: budget of the drafts in hand;
  * ``plan_step``: depth of the next drafts, then the budget;
  * ``serve_step``: ``plan_budget`` with corrected costs, and what a step adds to learn
    from its time;
  * ``upstream.get_num_tokens``: the same decision in vLLM's adaptive verification;
  * ``upstream.reallocate_drafts``: what its decision costs the host afterwards. Its
    tensors are on the CPU and its ranking is left out, so this is a lower bound.

Upstream's manager comes from its real constructor, with placeholders for CUDA
streams and events. Arms alternate; both must choose the same budget before any is
timed. Warm caches; the time of a call is the mean of a short burst.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from vllm.config.dspark_capacity import default_draft_depths
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as upstream
from vllm.v1.worker.gpu.spec_decode.dspark.planner import (
    PlanInputs,
    plan_budget,
    plan_step,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sps_curve import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.step_corrector import (
    PlannedBatch,
    StepCorrector,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_times import StepTimes

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.arguments import output_file, positive_int, seed_number  # noqa: E402
from benchmarks.common import (  # noqa: E402
    Record,
    append_records,
    interleave,
    print_table,
)

BURST = 20
# Upstream's ranking of drafts on the device.
RANKING = "_assign_draft_token_budget_compiled"
# Roughly one H200 with Qwen3-8B dimensions: 6 ms of weights, then 10 us per token.
BASE_MS, TOKEN_MS, DRAFT_BASE_MS, DRAFT_TOKEN_MS = 6.0, 0.01, 1.0, 0.006


def make_costs(num_reqs: int, k: int) -> StepCosts:
    """Linear tables whose uniform graphs cost the same as varlen ones."""
    reqs = np.arange(num_reqs + 1)
    depths = default_draft_depths(k)
    return StepCosts(
        {d: DRAFT_BASE_MS + DRAFT_TOKEN_MS * d * reqs for d in depths},
        {d: BASE_MS + TOKEN_MS * reqs * (d + 1) for d in depths},
        BASE_MS + TOKEN_MS * np.arange(num_reqs * (k + 1) + 1),
    )


def make_upstream(
    costs: StepCosts, confidences: np.ndarray
) -> tuple[upstream.AdaptiveVerificationManager, list[str]]:
    """Build upstream's manager on the CPU, holding ``confidences`` and our costs."""
    num_reqs, k = confidences.shape
    req_ids = [f"request-{i}" for i in range(num_reqs)]
    states = SimpleNamespace(
        num_speculative_steps=k,
        device=torch.device("cpu"),
        max_num_reqs=num_reqs,
        max_num_batched_tokens=costs.max_num_tokens,
        req_id_to_index={r: i for i, r in enumerate(req_ids)},
        num_computed_tokens_np=np.full(num_reqs, 100, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.full(num_reqs, 50, dtype=np.int32)),
    )
    query_start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32)
    with mock.patch("torch.cuda.Stream"), mock.patch("torch.cuda.Event"):
        manager = upstream.AdaptiveVerificationManager(
            states, query_start_loc, num_bonus_tokens=1, max_total_logits=10**9
        )
    manager.cost_tables = (costs.draft_ms[k], costs.verify_varlen_ms)
    for slot in manager._stale_confidences:
        slot.np[:] = confidences
    return manager, req_ids


def make_arms(num_reqs: int, k: int, seed: int) -> dict[str, Callable[[], object]]:
    """Build the arms of one case and check that both choose the same budget."""
    rng = np.random.default_rng(seed)
    confidences = rng.beta(4.0, 2.0, (num_reqs, k)).astype(np.float32)
    costs = make_costs(num_reqs, k)
    inputs = PlanInputs(
        survival_probs=np.cumprod(confidences.astype(np.float64), axis=1),
        scheduled_drafts=np.full(num_reqs, k, dtype=np.int32),
        num_non_draft_tokens=num_reqs,
        num_sampling_reqs=num_reqs,
        max_draft_budget=10**9,
        current_depth=k,
        next_survival=np.cumprod(np.full(k, 2 / 3)),
        depths=costs.depths,
    )
    corrector = StepCorrector(costs, StepTimes(SimpleNamespace(world_size=1), None))
    batch = PlannedBatch(num_reqs, num_reqs * (k + 1), k, False, True, 500.0)
    serials = itertools.count(1)

    def serve_step() -> object:
        corrector.learn()
        plan = plan_budget(inputs, costs, correction=corrector.correction)
        serial = next(serials)
        corrector.note(serial, batch, k)
        corrector.times.add(serial, BASE_MS)
        return plan

    manager, req_ids = make_upstream(costs, confidences)
    tokens = dict.fromkeys(req_ids, k + 1)
    drafts = {r: [0] * k for r in req_ids}
    idx_mapping = torch.arange(num_reqs, dtype=torch.int32)

    ours = plan_budget(inputs, costs, margin=0.0).draft_budget
    theirs = manager.get_num_tokens(tokens, drafts) - num_reqs
    if ours != theirs:
        raise RuntimeError(f"R={num_reqs}, K={k}: budget {ours}, upstream {theirs}")
    batch_budget = manager._batch_budget

    def reallocate() -> object:
        manager._batch_budget = batch_budget
        return manager.reallocate_drafts(req_ids, idx_mapping)

    return {
        "plan_budget": lambda: plan_budget(inputs, costs),
        "plan_step": lambda: plan_step(inputs, costs),
        "serve_step": serve_step,
        "upstream.get_num_tokens": lambda: manager.get_num_tokens(tokens, drafts),
        "upstream.reallocate_drafts": reallocate,
    }


def burst_us(call: Callable[[], object]) -> float:
    """Mean time of a call in one burst, microseconds."""
    start = time.perf_counter_ns()
    for _ in range(BURST):
        call()
    return (time.perf_counter_ns() - start) / BURST / 1000.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        description="Host time of one plan, next to upstream's."
    )
    parser.add_argument("-o", "--out", type=output_file, help="append JSON lines here")
    parser.add_argument(
        "--num-reqs", type=positive_int, nargs="+", default=[8, 64, 256, 1024]
    )
    parser.add_argument("--depths", type=positive_int, nargs="+", default=[5, 7, 16])
    add = parser.add_argument
    add("--repeats", type=positive_int, default=30, help="bursts per arm")
    add("--seed", type=seed_number, default=0)
    return parser.parse_args(argv)


def main() -> None:
    """Run the cases, print the table and write the records."""
    args = parse_args()
    torch.set_num_threads(1)
    cases = [(r, k) for k in args.depths for r in args.num_reqs]
    records: list[Record] = []
    with mock.patch.object(upstream, RANKING, lambda *_: None):
        for num_reqs, k in tqdm(cases, file=sys.stderr):
            arms = make_arms(num_reqs, k, args.seed)
            for call in arms.values():
                burst_us(call)  # warms up
            samples = interleave(
                list(arms), args.repeats, lambda arm, arms=arms: burst_us(arms[arm])
            )
            new = [
                Record(
                    "planner",
                    {"R": num_reqs, "K": k},
                    arm,
                    "host time",
                    "us",
                    us,
                    args.seed,
                )
                for arm, us in samples.items()
            ]
            if args.out:
                append_records(args.out, new)
            records += new
    print_table(records, title="Host time per call, one thread: median (IQR)")


if __name__ == "__main__":
    main()
