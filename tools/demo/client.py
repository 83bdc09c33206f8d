# SPDX-License-Identifier: Apache-2.0
"""Drive a served model at one concurrency and read what its counters say about it.

Invariants (pinned by tests)
- At most `concurrency` requests are in flight, and that many are reached.
- A failed request ends the level with `DemoError`: it is never left out of a figure.
- The figures of a level are differences of /metrics around that level only.
"""

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tools.demo.arms import MODEL_NAME, Settings
from tools.demo.errors import DemoError
from tools.demo.server import Server

T = TypeVar("T")

# Counter of /metrics -> our name for it.
_COUNTERS = {
    "vllm:dspark_capacity_num_drafted_tokens_total": "drafted",
    "vllm:dspark_capacity_num_verified_tokens_total": "verified",
    "vllm:dspark_capacity_draft_depth_sum_total": "draft_depth_sum",
    "vllm:spec_decode_num_drafts_total": "num_drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
_STEPS = "vllm:dspark_capacity_num_steps_total"
_STATES = {"fixed": "fixed_steps", "active": "active_steps"}
_SETTLE_S = 0.2
_MAX_SETTLE_POLLS = 25
_WATCH_S = 1.0
# Enough to visit every part of a step; each kernel's first run is the slow one.
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Completion:
    """What came back for one prompt."""

    text: str
    token_ids: tuple[int, ...] | None
    """None where the server does not return token ids."""
    finish_reason: str
    num_tokens: int | None
    """None where the server does not count them."""

    def same_output(self, other: "Completion") -> bool:
        """Return whether both hold the same tokens (the same text without ids)."""
        if self.finish_reason != other.finish_reason:
            return False
        if self.token_ids is None or other.token_ids is None:
            return self.text == other.text
        return self.token_ids == other.token_ids


@dataclass(frozen=True)
class LevelRun:
    """One concurrency level on one server."""

    concurrency: int
    wall_s: float
    completions: tuple[Completion, ...]
    counters: dict[str, float] | None
    """Differences of the counters over the level; None without speculation."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the level."""
        return sum(c.num_tokens for c in self.completions) / self.wall_s


def load_prompts(path: Path, num_prompts: int) -> list[str]:
    """Return `num_prompts` held-out prompts, taking the kinds in turn.

    Args:
        path: JSON lines with the fields `kind` and `prompt`.
        num_prompts: how many.

    Raises:
        DemoError: the file is missing or holds fewer prompts.
    """
    if not path.is_file():
        raise DemoError(f"prompts: {path} is missing; it is part of the repository")
    by_kind: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        by_kind.setdefault(row["kind"], []).append(row["prompt"])
    turns = chain.from_iterable(zip_longest(*by_kind.values()))
    prompts = [prompt for prompt in turns if prompt is not None]
    if num_prompts > len(prompts):
        raise DemoError(
            f"--num-prompts {num_prompts}: {path} holds {len(prompts)}; ask for fewer"
        )
    return prompts[:num_prompts]


def parse_counters(metrics_text: str) -> dict[str, float]:
    """Return the demo's counters out of a /metrics page, summed over engines.

    Raises:
        DemoError: a counter is absent; the message names all that are.
    """
    values = dict.fromkeys([*_COUNTERS.values(), *_STATES.values()], 0.0)
    seen: set[str] = set()
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            if sample.name == _STEPS:
                values[_STATES[sample.labels["state"]]] += sample.value
            elif sample.name in _COUNTERS:
                values[_COUNTERS[sample.name]] += sample.value
            else:
                continue
            seen.add(sample.name)
    absent = sorted({*_COUNTERS, _STEPS} - seen)
    if absent:
        raise DemoError(
            f"/metrics lacks {', '.join(absent)}: the capacity feature is not on in "
            "this server. Is the overlay linked (python tools/link_overlay.py)?"
        )
    return values


async def read_counters(base_url: str) -> dict[str, float]:
    """Return the counters once they stand still.

    The engine reports a step's counters after its tokens, so those read right behind
    the last completion may miss the last step.

    Raises:
        DemoError: the page cannot be read, lacks a counter or never stands still.
    """
    async with httpx.AsyncClient(base_url=base_url, timeout=10.0) as http:
        before: dict[str, float] | None = None
        for _ in range(_MAX_SETTLE_POLLS):
            try:
                page = (await http.get("/metrics")).text
            except httpx.HTTPError as error:
                raise DemoError(f"/metrics cannot be read: {error!r}") from error
            now = parse_counters(page)
            if now == before:
                return now
            before = now
            await asyncio.sleep(_SETTLE_S)
    raise DemoError("/metrics: the counters still move with no request in flight")


async def complete(
    client: openai.AsyncOpenAI,
    prompt: str,
    *,
    model: str,
    max_tokens: int,
    **options: Any,
) -> Completion:
    """Send one greedy request to /v1/completions and return what came back.

    Args:
        client: the client.
        prompt: the prompt.
        model: the served model's name.
        max_tokens: limit of tokens.
        **options: further arguments of `completions.create`, such as `extra_body`.

    Raises:
        openai.OpenAIError: the request failed, or the answer is no completion.
    """
    response = await client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0.0, **options
    )
    # The library passes on whatever a server answers with status 200.
    choices = getattr(response, "choices", None)
    if not choices:
        raise openai.OpenAIError(f"no completion, but {str(response)[:80]!r}")
    token_ids = getattr(choices[0], "token_ids", None)
    return Completion(
        text=choices[0].text,
        token_ids=tuple(token_ids) if token_ids is not None else None,
        finish_reason=choices[0].finish_reason,
        num_tokens=response.usage.completion_tokens if response.usage else None,
    )


async def run_level(
    client: openai.AsyncOpenAI,
    prompts: Sequence[str],
    *,
    concurrency: int,
    max_tokens: int,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[tuple[Completion, ...], float]:
    """Send every prompt once, `concurrency` at a time; return completions and seconds.

    Raises:
        DemoError: a request failed; the others are cancelled.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, prompt: str) -> Completion:
        async with gate:
            try:
                completion = await complete(
                    client,
                    prompt,
                    model=MODEL_NAME,
                    max_tokens=max_tokens,
                    extra_body={"return_token_ids": True},
                )
            except openai.OpenAIError as error:
                raise DemoError(
                    f"request {index} at C={concurrency} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
        on_done()
        return completion

    start = time.perf_counter()
    tasks = [asyncio.create_task(one(i, p)) for i, p in enumerate(prompts)]
    try:
        completions = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return tuple(completions), time.perf_counter() - start


async def watched(work: Awaitable[T], server: Server) -> T:
    """Await `work`, but give up as soon as the server's processes or log look dead.

    Raises:
        DemoError: from `work`, or with the log's tail when the server died.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_WATCH_S))[0]:
            server.check_alive()
    finally:
        if not task.done():
            # Waited for, so that no request outlives the client and fails aloud.
            task.cancel()
            await asyncio.wait({task})
    try:
        return task.result()
    except DemoError as error:
        raise server.failure(str(error)) from error


async def _measure(
    server: Server,
    client: openai.AsyncOpenAI,
    prompts: Sequence[str],
    *,
    with_counters: bool,
    **level: Any,
) -> LevelRun:
    before = await read_counters(server.base_url) if with_counters else None
    completions, wall_s = await run_level(client, prompts, **level)
    counters = None
    if before is not None:
        after = await read_counters(server.base_url)
        counters = {key: after[key] - before[key] for key in after}
    return LevelRun(level["concurrency"], wall_s, completions, counters)


async def sweep(
    server: Server,
    prompts: Sequence[str],
    settings: Settings,
    *,
    with_counters: bool,
    on_done: Callable[[], None] = lambda: None,
) -> list[LevelRun]:
    """Run every level on a ready server, after a short unmeasured warm-up.

    Args:
        server: the server, ready.
        prompts: the prompts of every level.
        settings: levels, token limit and request timeout.
        with_counters: also read the capacity counters around each level.
        on_done: called after each completion of a level.

    Raises:
        DemoError: a request failed, the server died or a counter is absent.
    """
    # No retries: a request that fails once is a finding.
    async with openai.AsyncOpenAI(
        base_url=f"{server.base_url}/v1",
        api_key="none",
        timeout=settings.request_timeout_s,
        max_retries=0,
    ) as client:
        measure = functools.partial(_measure, server, client, prompts)
        warm_up = measure(
            with_counters=False,
            concurrency=max(settings.concurrency),
            max_tokens=_WARM_UP_TOKENS,
        )
        await watched(warm_up, server)
        runs = []
        for concurrency in settings.concurrency:
            level = measure(
                with_counters=with_counters,
                concurrency=concurrency,
                max_tokens=settings.max_tokens,
                on_done=on_done,
            )
            runs.append(await watched(level, server))
        return runs
