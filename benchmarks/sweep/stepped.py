# SPDX-License-Identifier: Apache-2.0
"""An in-process ``LLM`` behind the driver's interface: stepped by hand."""

import random
from typing import Any

from benchmarks.sweep.driver import Progress
from benchmarks.sweep.traffic import Request


def prompt_of(request: Request) -> dict[str, list[int]]:
    """Return a random prompt, by the request's seed."""
    draw = random.Random(request.seed)
    # Ids that every vocabulary has.
    return {
        "prompt_token_ids": [draw.randrange(3, 700) for _ in range(request.prompt_len)]
    }


def sampling_params(request: Request, *, ignore_eos: bool = True) -> Any:
    """Return greedy ``SamplingParams`` with the request's length and seed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # Synthetic acceptance draws by seed and position: the same for every arm.
    return SamplingParams(
        temperature=0,
        max_tokens=request.output_len,
        ignore_eos=ignore_eos,
        detokenize=False,
        seed=request.seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class SteppedEngine:
    """An ``LLM`` behind the interface of the driver; a context manager.

    Tokens are counted where they leave the engine core: building an output object
    for each request and step would cost the host milliseconds.
    """

    def __init__(self, llm: Any):
        self._engine = llm.llm_engine
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._progress: list[Progress] = []

    def __enter__(self) -> "SteppedEngine":
        process = self._engine.output_processor.process_outputs

        def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            for output in outputs:
                if (number := self._numbers.get(output.request_id)) is not None:
                    finished = output.finish_reason is not None
                    new_tokens = len(output.new_token_ids)
                    self._progress.append(Progress(number, new_tokens, finished))
            return process(outputs, *args, **kwargs)

        self._engine.output_processor.process_outputs = watched
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine.output_processor.process_outputs

    def submit(self, request: Request) -> None:
        """Add a request."""
        name, prompt = str(request.number), prompt_of(request)
        own = self._engine.add_request(name, prompt, sampling_params(request))
        self._ids[request.number], self._numbers[own] = own, request.number

    def abort(self, number: int) -> None:
        """Drop a request."""
        self._engine.abort_request([self._ids[number]], internal=True)

    def step(self) -> list[Progress]:
        """Run one step."""
        self._engine.step()
        progress, self._progress = self._progress, []
        for number, _, finished in progress:
            if finished:
                self._numbers.pop(self._ids.pop(number, ""), None)
        return progress

    @property
    def num_unfinished(self) -> int:
        """Requests in the engine's own count."""
        return self._engine.get_num_unfinished_requests()


class MemoryLog:
    """Samples host and device memory once a second."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self.samples: list[tuple[float, float, float]] = []

    def __call__(self, time_s: float) -> None:
        import torch

        if self.samples and time_s < self.samples[-1][0] + 1.0:
            return
        device = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        host = self._process.memory_info().rss
        self.samples.append((time_s, host / 2**20, device / 2**20))
