# SPDX-License-Identifier: Apache-2.0
"""What does one draft admission cost, against upstream's compiled top-k path?

    python benchmarks/kernels/bench_admission.py --out admission.jsonl

Arms, each from the two count vectors of a step to capacities and both offsets:
  kernel    our launch alone
  native    the native operator alone (left out, with the reason, where it cannot run)
  ours      one staging copy, our launch
  upstream  two staging copies, upstream's torch.compile'd ranking, two cumulative
            sums, three fills (the device operations of its reallocate_drafts)
  eager     the same, ranking not compiled
  wN        our launch alone with N warps (--sweep-warps)
A staging copy is a device copy that stands for the step's host-to-device copy.

Metrics, all with a hot L2 cache and after warm-up:
  device    one step of many in a CUDA graph replay, by events
  host      Python time to launch one step, queue never full
  latency   from the call to the end of the work, synchronised each time

With --device cpu there is one metric, host: the whole call of native and of reference,
the two that are not interpreted. It says nothing about a GPU.

Every arm is checked before it is timed: ours equal the reference on all value
families; the others admit as many drafts and obey the row limits.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from vllm.config.dspark_values import DSparkCapacityConfigError
from vllm.v1.worker.gpu.spec_decode.dspark import capacity
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_native import (
    admit_drafts_native,
    load_native,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    CONFIDENCE_FAMILIES,
    AdmissionInputs,
    admit_drafts_reference,
    make_admission_inputs,
)

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.arguments import (  # noqa: E402
    list_of,
    number,
    one_of,
    output_file,
    positive_int,
    seed_number,
)
from benchmarks.common import Record, append_records, interleave, print_table  # noqa: E402

BENCH = "admission"
ARMS = ("kernel", "native", "ours", "upstream", "eager")
CPU_ARMS = ("native", "reference")
OUTPUTS = ("capacities_out", "cu_num_logits_out", "query_start_loc_out")
ENGINE_REQS = 1024  # max_num_seqs of the engine that is imitated
STEPS_PER_REPLAY = 20
CALLS_PER_SAMPLE = 20  # Far below the launch queue's length, about 1000.


class Case:
    """One batch on one device, with output buffers as the engine keeps them."""

    def __init__(self, inputs: AdmissionInputs, budget: int, device: str):
        self.inputs = inputs
        self.budget = budget
        self.num_reqs = len(inputs.idx_mapping)
        self.probs = inputs.confidence_probs.to(device)
        self.slots = inputs.idx_mapping.long().to(device)  # the engine's dtype
        self.counts = torch.stack(
            (inputs.scheduled_drafts, inputs.num_non_draft_tokens)
        ).to(device)
        self.staged = self.counts.clone()
        # As long as the engine's, so that padding the offsets is paid for.
        self.out_size = max(self.num_reqs, ENGINE_REQS) + 1
        self.outs = self.make_outs(device)
        self.num_tokens = int(inputs.num_non_draft_tokens.sum()) + budget

    def make_outs(self, device: str) -> dict[str, torch.Tensor]:
        return {
            name: torch.full((self.out_size,), -1, dtype=torch.int32, device=device)
            for name in OUTPUTS
        }

    def run_kernel(self, admit: capacity.AdmitDrafts = capacity.admit_drafts) -> None:
        admit(
            self.probs,
            self.slots,
            *self.staged,
            self.budget,
            num_bonus_tokens=1,
            fill_budget=True,
            **self.outs,
        )

    def run_ours(self) -> None:
        self.staged.copy_(self.counts)
        self.run_kernel()

    def run_with_warps(self, num_warps: int) -> None:
        # A benchmark may reach inside: the table is what is being tuned.
        warps = capacity._ROW_BLOCK_WARPS
        row_block = next(n for n in warps if self.num_reqs <= n)
        usual, warps[row_block] = warps[row_block], num_warps
        try:
            self.run_kernel()
        finally:
            warps[row_block] = usual

    def run_topk(self, rank: Callable[..., None]) -> None:
        capacities, cu_num_logits, query_start_loc = self.outs.values()
        capacities = capacities[: self.num_reqs]
        end = self.num_reqs + 1
        capacities.copy_(self.counts[0])
        rank(self.probs, self.slots, capacities, self.budget, self.probs.shape[1])
        self.staged[1].copy_(self.counts[1])
        cu_num_logits[:1].zero_()
        torch.cumsum(capacities + 1, dim=0, out=cu_num_logits[1:end])
        query_start_loc[:1].zero_()
        torch.cumsum(capacities + self.staged[1], dim=0, out=query_start_loc[1:end])
        query_start_loc[end:].fill_(self.num_tokens)

    def check(self, arm: str, run: Callable[[], None]) -> None:
        """Raise if the arm's outputs are wrong."""
        for out in self.outs.values():
            out.fill_(-1)
        run()
        found = {name: out.cpu() for name, out in self.outs.items()}
        capacities = found["capacities_out"][: self.num_reqs]
        if arm in ("upstream", "eager"):
            # Its ties and its product order are open, so only the totals are fixed.
            is_right = int(capacities.sum()) == self.budget and bool(
                (capacities <= self.inputs.scheduled_drafts).all()
            )
        else:
            expected = self.make_outs("cpu")
            admit_drafts_reference(
                *vars(self.inputs).values(),
                self.budget,
                num_bonus_tokens=1,
                fill_budget=True,
                **expected,
            )
            is_right = all(torch.equal(found[name], expected[name]) for name in OUTPUTS)
        if not is_right:
            raise RuntimeError(
                f"arm {arm!r} is wrong at R={self.num_reqs}, K={self.probs.shape[1]}, "
                f"budget={self.budget}: capacities {capacities.tolist()}. Nothing was "
                "timed; run the tests of the admission kernel on this machine."
            )


def make_arms(case: Case, names: list[str]) -> dict[str, Callable[[], None]]:
    arms = {}
    for name in names:
        if name in ("upstream", "eager"):
            from vllm.v1.worker.gpu.spec_decode import adaptive_verification as upstream

            compiled = name == "upstream"
            rank = (
                upstream._assign_draft_token_budget_compiled
                if compiled
                else upstream._assign_draft_token_budget
            )
            arms[name] = lambda rank=rank: case.run_topk(rank)
        elif name.startswith("w"):
            arms[name] = lambda warps=int(name[1:]): case.run_with_warps(warps)
        else:
            arms[name] = {
                "kernel": case.run_kernel,
                "native": lambda: case.run_kernel(admit_drafts_native),
                "reference": lambda: case.run_kernel(admit_drafts_reference),
                "ours": case.run_ours,
            }[name]
    return arms


def is_native_ready(device: str) -> bool:
    """Load the native operator; say why where that is not possible."""
    try:
        load_native(torch.device(device))
    except DSparkCapacityConfigError as e:
        print(f"No native arm. {e}", file=sys.stderr)
        return False
    return True


def check_all_families(device: str, names: list[str]) -> int:
    """Check our arms on every family, edge budgets and sizes; return the count."""
    num_checks = 0
    shapes = ((1, 1), (3, 7), (64, 5), (65, 7), (256, 16), (1024, 16), (4096, 8))
    for num_reqs, num_steps in tqdm(shapes, desc="checking", file=sys.stderr):
        for family in CONFIDENCE_FAMILIES:
            inputs = make_admission_inputs(
                num_reqs, num_steps, family=family, is_ragged=False
            )
            total = inputs.num_drafts
            for budget in sorted({0, 1, total // 3, total - 1, total}):
                case = Case(inputs, budget, device)
                for name, run in make_arms(case, names).items():
                    case.check(name, run)
                    num_checks += 1
    return num_checks


def time_device(arms: dict[str, Callable[[], None]], rounds: int):
    """Return {arm: device microseconds per step} from CUDA graph replays."""
    graphs = {}
    for name, run in arms.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(STEPS_PER_REPLAY):
                run()

    def measure(name: str) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graphs[name].replay()  # Brings inputs and code into the caches.
        begin.record()
        graphs[name].replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / STEPS_PER_REPLAY

    return interleave(list(arms), rounds, measure)


def time_calls(arms: dict[str, Callable[[], None]], rounds: int, *, wait_each: bool):
    """Return {arm: microseconds per call}, waiting for the device or not."""
    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else torch.cpu.synchronize

    def measure(name: str) -> float:
        run = arms[name]
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS_PER_SAMPLE):
            run()
            if wait_each:
                wait()
        return (time.perf_counter() - begin) * 1e6 / CALLS_PER_SAMPLE

    return interleave(list(arms), rounds, measure)


def bench_case(case: Case, labels: dict, names: list[str], args) -> list[Record]:
    arms = make_arms(case, names)
    for name, run in arms.items():
        case.check(name, run)
        for _ in range(3):
            run()
    timings = {"host": time_calls(arms, args.rounds, wait_each=False)}
    if args.device == "cuda":
        timings["device"] = time_device(arms, args.rounds)
        timings["latency"] = time_calls(arms, args.rounds, wait_each=True)
    return [
        Record(BENCH, labels, arm, metric, "us", samples, seed=args.seed)
        for metric, by_arm in timings.items()
        for arm, samples in by_arm.items()
    ]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    ints = list_of(positive_int)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--out", type=output_file, help="append JSON lines to this file"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arms", type=list_of(one_of(ARMS)), default=list(ARMS))
    sizes = [8, 32, 64, 128, 256, 512, 1024]
    parser.add_argument("--num-reqs", type=ints, default=sizes)
    parser.add_argument("--num-steps", type=ints, default=[5, 7])
    parser.add_argument(
        "--families",
        type=list_of(one_of(CONFIDENCE_FAMILIES)),
        default=["confident"],
        help=f"of {', '.join(CONFIDENCE_FAMILIES)} ('ones' is the slowest for us)",
    )
    parser.add_argument(
        "--budget-frac", type=number(0, 0.99, open_low=True), default=0.5
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=30, help="samples per arm"
    )
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--sweep-warps", type=ints, default=[], metavar="N,N")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "No CUDA device. --device cpu checks our arms on the CPU (the kernel with "
            "TRITON_INTERPRET=1; else the reference checks itself) and times native "
            "there.",
            file=sys.stderr,
        )
        return 2
    has_native = is_native_ready(args.device)
    checked = ["kernel", "native"] if has_native else ["kernel"]
    num_checks = check_all_families(args.device, checked)
    print(f"{num_checks} admissions ({', '.join(checked)}) equal the reference.")
    names = args.arms + [f"w{n}" for n in args.sweep_warps]
    if args.device == "cpu":
        names = list(CPU_ARMS)
    if not has_native:
        names = [name for name in names if name != "native"]
        if args.device == "cpu" or not names:
            return 0
    cases = [
        (num_reqs, num_steps, family)
        for num_steps in args.num_steps
        for num_reqs in args.num_reqs
        for family in args.families
    ]
    records = []
    for num_reqs, num_steps, family in tqdm(cases, file=sys.stderr):
        inputs = make_admission_inputs(
            num_reqs, num_steps, family=family, seed=args.seed, is_ragged=False
        )
        budget = max(1, int(inputs.num_drafts * args.budget_frac))
        labels = {"R": num_reqs, "K": num_steps, "budget": budget, "family": family}
        new = bench_case(Case(inputs, budget, args.device), labels, names, args)
        if args.out:
            append_records(args.out, new)
        records += new
    title = f"Draft admission on {args.device}, us: median (IQR)"
    baseline = "reference" if args.device == "cpu" else "upstream"
    print_table(records, title=title, baseline=baseline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
