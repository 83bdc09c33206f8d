# SPDX-License-Identifier: Apache-2.0
"""A small stand-in for the API server: completions, /health and /metrics.

Run as a program it serves one arm of the demo; `--fault` picks what goes wrong.
Capacity counts as active while at least `ACTIVE_FROM` requests are in flight.
"""

import argparse
import asyncio
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

ACTIVE_FROM = 4
DEPTH = 7
ACCEPTED = 3
FAULTS = (
    "none",
    "differ",  # one token of the completions differs
    "differ-once",  # only in the first completion
    "differ-text",  # the same, but the server returns no token ids
    "never-active",
    "always-active",
    "no-counters",
    "refuse",  # every request is answered with 500
    "never-ready",
    "exit",  # exits at start
    "fatal-log",  # logs a dead engine core, but lives on
    "zombie",  # its engine core dies unreaped, without a log line
    "die-later",  # dies at the first completion
    "hang",  # logs a dead engine core at the first completion and never answers
    "slow",  # never answers a completion, and nothing is wrong with it
    "stubborn",  # ignores SIGTERM, has a child in a session of its own
)


class FakeEngine:
    def __init__(self, *, capacity: bool, fault: str = "none", delay_s: float = 0.01):
        self.capacity = capacity
        self.fault = fault
        self.delay_s = delay_s
        self.in_flight = 0
        self.max_in_flight = 0
        self.requests: list[dict] = []
        self.steps = {"fixed": 0, "active": 0}
        self.num_drafts = 0
        self.model_names = ["fake"]
        self.finish_reason = "length"

    def _active(self) -> bool:
        if self.fault in ("never-active", "always-active"):
            return self.fault == "always-active"
        return self.in_flight >= ACTIVE_FROM

    def _tokens(self, body: dict) -> list[int]:
        tokens = [ord(c) for c in body["prompt"]][-body["max_tokens"] :]
        right = self.fault == "differ-once" and self.num_drafts > 1
        if self.capacity and self.fault.startswith("differ") and not right:
            tokens[-1] += 1
        return tokens

    async def complete(self, request: web.Request) -> web.Response:
        if self.fault == "die-later":
            os._exit(3)
        if self.fault in ("hang", "slow"):
            fatal = "EngineCore encountered a fatal error"
            print(fatal if self.fault == "hang" else "slow request", flush=True)
            await asyncio.sleep(600)
        if self.fault == "refuse":
            return web.json_response(
                {"error": {"message": "engine is dead"}}, status=500
            )
        body = await request.json()
        self.requests.append(body)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        await asyncio.sleep(self.delay_s)
        self.steps["active" if self._active() else "fixed"] += 1
        self.num_drafts += 1
        self.in_flight -= 1
        tokens = self._tokens(body)
        choice = {
            "index": 0,
            "text": "".join(map(chr, tokens)),
            "finish_reason": self.finish_reason,
            "logprobs": None,
        }
        if self.fault != "differ-text" and body.get("return_token_ids"):
            # Text may hide a difference of tokens: only the ids tell it here.
            choice |= {"token_ids": tokens, "text": "same"}
        usage = {"prompt_tokens": 1, "completion_tokens": len(tokens)}
        return web.json_response(
            {
                "id": "x",
                "object": "text_completion",
                "created": 0,
                "model": body["model"],
                "choices": [choice],
                "usage": usage | {"total_tokens": 1 + len(tokens)},
            }
        )

    def metrics_text(self) -> str:
        lines = ["# TYPE vllm:other gauge", "vllm:other 1.0"]

        def counter(name: str, value: float, labels: str = "") -> None:
            labels = f'{{engine="0",model_name="m"{labels}}}'
            lines.append(f"# TYPE vllm:{name} counter")
            lines.append(f"vllm:{name}_total{labels} {float(value)}")

        if self.capacity and self.fault != "no-counters":
            for state, steps in self.steps.items():
                counter("dspark_capacity_num_steps", steps, f',state="{state}"')
            num_steps = sum(self.steps.values())
            counter("dspark_capacity_num_drafted_tokens", DEPTH * self.num_drafts)
            counter("dspark_capacity_num_verified_tokens", 5 * self.num_drafts)
            counter("dspark_capacity_draft_depth_sum", DEPTH * num_steps)
            counter("spec_decode_num_drafts", self.num_drafts)
            counter("spec_decode_num_accepted_tokens", ACCEPTED * self.num_drafts)
        return "\n".join(lines) + "\n"

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics_text())

    async def models(self, request: web.Request) -> web.Response:
        models = [{"id": name, "object": "model"} for name in self.model_names]
        return web.json_response({"object": "list", "data": models})

    async def health(self, request: web.Request) -> web.Response:
        bad = self.fault in ("never-ready", "fatal-log", "zombie")
        return web.Response(status=503 if bad else 200)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health", self.health)
        return app


@contextmanager
def in_thread(app: web.Application) -> Iterator[str]:
    """Serve an application on a thread of its own; yields its address."""
    loop, runner = asyncio.new_event_loop(), web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def spawn_zombie() -> None:
    """Fork a child titled like vLLM's engine core that dies and is never reaped."""
    import setproctitle

    if os.fork() == 0:
        setproctitle.setproctitle("VLLM::EngineCore")
        os._exit(9)


def map_shared_file() -> mmap.mmap:
    """Map a file under /dev/shm and start a child that no group signal reaches."""
    path = Path(f"/dev/shm/dspark-demo-test-{os.getpid()}")
    path.write_bytes(bytes(mmap.PAGESIZE))
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(f"child={child.pid} shm={path}", flush=True)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--capacity", action="store_true")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    args = parser.parse_args()
    print("fake server starts", args.fault, flush=True)
    if args.fault == "exit":
        sys.exit("ValueError: a bad option")
    if args.fault == "fatal-log":
        print("ERROR EngineCore failed to start.", flush=True)
    if args.fault == "zombie":
        spawn_zombie()
    shared = map_shared_file() if args.fault == "stubborn" else None
    engine = FakeEngine(capacity=args.capacity, fault=args.fault)
    loop = asyncio.new_event_loop()
    if args.fault == "stubborn":
        loop.call_soon(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    web.run_app(
        engine.app(),
        host="127.0.0.1",
        port=args.port,
        print=None,
        loop=loop,
        handle_signals=args.fault != "stubborn",
        shutdown_timeout=0.5,
    )
    del shared


if __name__ == "__main__":
    main()
