# SPDX-License-Identifier: Apache-2.0
"""What does online calibration cost a step?

    python benchmarks/kernels/bench_sts.py --out sts.jsonl

Arms: ``apply`` (in the draft graph), ``observe`` (each active step), ``fit`` (each
``FIT_INTERVAL``-th) and ``step`` = observe + fit / FIT_INTERVAL, the amortised cost.
Metrics, with a hot L2 cache and after warm-up: ``device``, one call of a graph of
many, so that no launch is in it; ``host``, Python time to launch one call, queue never
full. The fit is
checked against its reference before anything is timed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.arguments import output_file, positive_int  # noqa: E402
from benchmarks.common import Record, append_records, print_table  # noqa: E402
from tests.helpers.sts_cases import draw_rows, ring_of  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.dspark.online_sts import (  # noqa: E402
    FIT_INTERVAL,
    MAX_ROWS_PER_STEP,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit_kernel import (  # noqa: E402
    fit_confidences,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_kernels import (  # noqa: E402
    calibrate_confidences,
    observe_drafts,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import (  # noqa: E402
    RING_ROWS,
    DraftRing,
    JudgedDrafts,
    fit_confidences_reference,
)

CALLS_PER_SAMPLE = 20


def make_arms(num_reqs: int, num_steps: int, device: str) -> dict[str, Callable]:
    """Return what each arm runs.

    Raises:
        RuntimeError: The fit differs from its reference; nothing is timed then.
    """
    rows = draw_rows(RING_ROWS, num_steps, scale=2.5, trim=0.3)
    filled = ring_of(rows, rows, device=device)
    prior = torch.zeros(2, 3, num_steps, device=device)
    prior[:, 0] = 1.0
    found, expected = prior.clone(), prior.clone()
    fit_confidences(filled, prior, calibration_out=found)
    fit_confidences_reference(filled, prior, calibration_out=expected)
    if not torch.allclose(found, expected, atol=5e-3):
        raise RuntimeError(f"the fit is wrong: {found.tolist()}; run its tests here")
    ring = DraftRing.empty(num_reqs, num_steps, device)
    slots = torch.randperm(num_reqs, device=device)
    counts = torch.full((num_reqs,), 3, dtype=torch.int32, device=device)
    judged = JudgedDrafts(slots, counts, counts)
    logits = torch.randn(num_reqs, num_steps, device=device)
    probs, temperature = torch.sigmoid(logits), torch.ones(num_reqs, device=device)
    stride = max(1, num_reqs // MAX_ROWS_PER_STEP)
    return {
        "apply": lambda: calibrate_confidences(
            slots, temperature, found, probs_out=probs, logits_out=logits
        ),
        "observe": lambda: observe_drafts(
            judged,
            logits,
            temperature,
            ring,
            stamp=1,
            draft_depth=num_steps,
            sample_stride=stride,
        ),
        "fit": lambda: fit_confidences(filled, prior, calibration_out=found),
    }


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of ``CALLS_PER_SAMPLE`` calls."""
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_SAMPLE):
            run()
    return graph


def time_device(graph: torch.cuda.CUDAGraph) -> float:
    """Return device microseconds of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()  # brings inputs and code into the caches
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / CALLS_PER_SAMPLE


def time_host(run: Callable[[], None]) -> float:
    """Return host microseconds to launch one call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS_PER_SAMPLE):
        run()
    return (time.perf_counter() - began) * 1e6 / CALLS_PER_SAMPLE


def main(argv: list[str] | None = None) -> int:
    """Time all arms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reqs", type=positive_int, nargs="+", default=[8, 64, 256])
    parser.add_argument(
        "--steps", type=positive_int, default=7, help="draft positions K"
    )
    parser.add_argument("--rounds", type=positive_int, default=30)
    parser.add_argument("-o", "--out", type=output_file)
    args = parser.parse_args(argv)
    if min(args.reqs) < 1 or args.rounds < 1 or not 1 <= args.steps <= 16:
        parser.error("--reqs and --rounds must be at least 1, --steps in [1, 16]")
    if not torch.cuda.is_available():
        parser.error("this benchmark times a GPU and there is none. Run it on one")
    records = []
    for num_reqs in args.reqs:
        arms = make_arms(num_reqs, args.steps, "cuda")
        samples = {(arm, m): [] for arm in arms for m in ("device", "host")}
        graphs = {arm: capture(run) for arm, run in arms.items()}
        for _ in range(args.rounds):
            for arm, run in arms.items():
                samples[arm, "device"].append(time_device(graphs[arm]))
                samples[arm, "host"].append(time_host(run))
        for metric in ("device", "host"):
            observe, fit = (np.array(samples[a, metric]) for a in ("observe", "fit"))
            samples["step", metric] = (observe + fit / FIT_INTERVAL).tolist()
        case = {"R": num_reqs, "K": args.steps}
        records += [
            Record("sts", case, arm, metric, "us", values)
            for (arm, metric), values in samples.items()
        ]
    print_table(records, title="Online calibration")
    if args.out is not None:
        append_records(args.out, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
