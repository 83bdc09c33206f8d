# SPDX-License-Identifier: Apache-2.0
"""Start, watch and stop one API server in a process group of its own.

Invariants (pinned by tests)
- After `Server.stop`, no process that the server started is alive, and the shared
  memory files that those processes had mapped are gone.
- A server that dies, whose engine core dies, or that is not ready in time raises
  `DemoError` with the tail of its log: an API server outlives its dead engine core
  for a minute and more, so its own exit is not what we wait for.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from tools.demo.errors import DemoError

# What vLLM logs when the engine core or a worker is gone for good.
_FATAL_LOG = re.compile(
    r"Engine core initialization failed|EngineCore failed to start"
    r"|WorkerProc failed to start|died unexpectedly|EngineDeadError"
    r"|EngineCore encountered a fatal error"
)
_POLL_S = 0.25
# Time for the traceback to reach the log after the first fatal line.
_TRACEBACK_GRACE_S = 1.0


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def mapped_shared_memory(processes: Sequence[psutil.Process]) -> set[Path]:
    """Return the files under /dev/shm that any of `processes` has mapped."""
    paths: set[Path] = set()
    for process in processes:
        with suppress(psutil.Error, OSError):
            paths |= {
                Path(entry.path)
                for entry in process.memory_maps()
                if entry.path.startswith("/dev/shm/")
            }
    return paths


class Server:
    """One server process group. Per use: enter (start), `wait_ready`, exit (stop)."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ready_timeout_s: float = 300.0,
        ready_timeout_option: str = "--ready-timeout SECONDS",
        stop_grace_s: float = 20.0,
    ) -> None:
        """Describe the server; nothing is started yet.

        Args:
            name: what messages call it.
            command: the command line, which must make it listen on `port`.
            port: TCP port on 127.0.0.1.
            log_path: file that takes its stdout and stderr; overwritten.
            env: variables set on top of this process's environment.
            cwd: its working directory; None is this process's.
            ready_timeout_s: seconds until /health must answer 200.
            ready_timeout_option: what a user changes to allow more.
            stop_grace_s: seconds between the polite signal and the kill.
        """
        self.name = name
        self.base_url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        self._command = list(command)
        self._env = dict(env or {})
        self._cwd = cwd
        self._ready_timeout_s = ready_timeout_s
        self._ready_timeout_option = ready_timeout_option
        self._stop_grace_s = stop_grace_s
        self._process: psutil.Popen | None = None
        self._tmp_dir: str | None = None

    def __enter__(self) -> "Server":
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # vLLM leaves rendezvous files in the temporary directory when it is killed:
        # a directory of its own is removed with everything in it.
        self._tmp_dir = tempfile.mkdtemp(prefix="dspark-demo-")
        env = {**os.environ, **self._env, "TMPDIR": self._tmp_dir}
        with self.log_path.open("wb") as log:
            # A session of its own: a Ctrl-C in the terminal reaches only the demo,
            # which then stops the server in order.
            self._process = psutil.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self._cwd,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def log_tail(self, num_lines: int = 40) -> str:
        """Return the last lines of the log."""
        text = self.log_path.read_text(errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    def failure(self, why: str) -> DemoError:
        """Return an error that says `why`, with the log's tail and path."""
        return DemoError(
            f"server '{self.name}': {why}\n"
            f"--- last lines of {self.log_path} ---\n{self.log_tail()}"
        )

    def check_alive(self) -> None:
        """Look at the process, its children and its log once.

        Raises:
            DemoError: the server exited, or its engine core or a worker is dead.
        """
        assert self._process is not None, "entered before"
        returncode = self._process.poll()
        if returncode is not None:
            raise self.failure(f"exited with status {returncode}")
        for child in self._descendants()[1:]:
            with suppress(psutil.NoSuchProcess):
                # vLLM titles its engine core and workers "VLLM::...". Other children
                # (probes of the host) may come and go.
                dead = child.status() == psutil.STATUS_ZOMBIE
                if dead and child.name().startswith("VLLM::"):
                    raise self.failure(f"its process {child.name()} died")
        match = _FATAL_LOG.search(self.log_path.read_text(errors="replace"))
        if match:
            time.sleep(_TRACEBACK_GRACE_S)
            raise self.failure(f"its log says '{match.group()}'")

    def is_healthy(self) -> bool:
        """Return whether /health answers 200 now."""
        try:
            response = httpx.get(f"{self.base_url}/health", timeout=5.0)
        except httpx.HTTPError:
            return False
        return response.status_code == httpx.codes.OK

    def wait_ready(self) -> float:
        """Block until the server serves.

        Returns:
            Seconds from the call to the first good /health.

        Raises:
            DemoError: it died, or was not ready within `ready_timeout_s`.
        """
        start = time.monotonic()
        while (waited := time.monotonic() - start) < self._ready_timeout_s:
            self.check_alive()
            if self.is_healthy():
                return waited
            time.sleep(_POLL_S)
        raise self.failure(
            f"not ready after {self._ready_timeout_s:.0f} s; "
            f"allow more with {self._ready_timeout_option}"
        )

    def stop(self) -> None:
        """Stop the whole process group and remove what it left; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        tree = self._descendants(process)
        shared_memory = mapped_shared_memory(tree)
        # Only the API server is asked: it stops its children in order. Who is left
        # after the grace is killed.
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
        try:
            _, alive = psutil.wait_procs(tree, timeout=self._stop_grace_s)
        except KeyboardInterrupt:
            alive = tree  # A second Ctrl-C: no more patience.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for survivor in alive:
            with suppress(psutil.NoSuchProcess):
                survivor.kill()
        psutil.wait_procs(alive, timeout=5.0)
        for path in shared_memory:
            path.unlink(missing_ok=True)
        if self._tmp_dir:
            shutil.rmtree(self._tmp_dir, ignore_errors=True)

    def _descendants(self, process: psutil.Popen | None = None) -> list[psutil.Process]:
        process = process or self._process
        try:
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return [process]
