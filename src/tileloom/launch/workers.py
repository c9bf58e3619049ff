"""Child processes that compile kernels, and the pool that feeds, times and kills them.

The parent never imports Triton. A child gets one job at a time over a pipe; what it and the tools
it starts write goes to a file of its own, of which the last lines are quoted when it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

from tileloom.launch.aot import CompiledKernel, CompileFailure, CompileResult, KernelSpec

Job = tuple[KernelSpec, str]

_START_S = 120.0  # for a child to import Triton: it takes about a second on an idle machine
_QUOTED_LINES = 12

_CAUSE = re.compile(r"\berror:|\bERROR:|Assertion .* failed|terminate called|what\(\):")

# Under TRITON_INTERPRET=1 Triton's decorators build functions for its interpreter: a child, whose
# work is to compile, starts without it.
_BOOT = (
    "import json, os, sys; os.environ.pop('TRITON_INTERPRET', None); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from tileloom.launch.worker import main; main(json.loads(sys.argv[2]))"
)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Any
    output: IO[bytes]
    deadline: float
    ready: bool = False
    job: int | None = None
    output_start: int = 0

    def last_lines(self) -> list[str]:
        """Return what matters of what the child wrote since its job began."""
        # `pread`, because a seek would also move where the child writes next.
        size = os.fstat(self.output.fileno()).st_size
        text = os.pread(self.output.fileno(), size, self.output_start).decode(errors="replace")
        return quote(text)

    def kill(self) -> int:
        """Kill the child and all that it started; return its exit status, its own if it had one.

        The group is killed before the child is waited for: until then its number is not reused.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.pipe.close()
        return status


def quote(text: str) -> list[str]:
    """Pick the lines of a compiler's output that say what went wrong.

    A failing pass prints its whole module and a reproducer after the cause, so the end of the
    output alone would not name it.

    Args:
        text: The output.

    Returns:
        At most twelve lines: those that name an error, each with two that follow; if there are
        none, the last lines. Long lines are cut.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    wanted = [i for i, line in enumerate(lines) if _CAUSE.search(line)]
    if wanted:
        lines = [
            lines[i] for i in sorted({i + k for i in wanted for k in range(3)}) if i < len(lines)
        ]
        lines = lines[:_QUOTED_LINES]
    lines = [line if len(line) <= 200 else line[:197] + "..." for line in lines]
    return lines[-_QUOTED_LINES:]


class WorkerPool:
    """Run compile jobs in child processes.

    Args:
        cache_dir: Folder for Triton's cache in every child.
        triton_path: A folder with another Triton, put first on the children's import path.
        timeout_s: Seconds for one job.
        is_kept: Whether idle children stay for the next `run`, until `close`: they take a second
            or two to come up. A kept child does not see a module again that it has imported.
    """

    def __init__(
        self,
        *,
        cache_dir: Path,
        triton_path: Path | None,
        timeout_s: float,
        is_kept: bool = False,
    ) -> None:
        self._cache_dir = cache_dir
        self._triton_path = triton_path
        self._timeout_s = timeout_s
        self._is_kept = is_kept
        self._workers: list[_Worker] = []

    def run(
        self,
        jobs: Sequence[Job],
        *,
        workers: int | None,
        on_result: Callable[[CompileResult], None] | None,
    ) -> list[CompileResult]:
        """Compile every job; see `compile_in_workers`."""
        self._jobs = jobs
        self._waiting = deque(range(len(jobs)))
        self._results: dict[int, CompileResult] = {}
        self._on_result = on_result
        for worker in [w for w in self._workers if w.process.poll() is not None]:
            self._end(worker)  # something killed it while it was idle
        self._wanted = workers or len(os.sched_getaffinity(0))
        try:
            while len(self._results) < len(jobs):
                missing = min(self._wanted, len(jobs) - len(self._results)) - len(self._workers)
                self._workers.extend(self._start() for _ in range(missing))
                self._step()
        finally:
            for worker in list(self._workers):
                if not self._is_kept or worker.job is not None or not worker.ready:
                    self._end(worker)
        return [self._results[index] for index in range(len(jobs))]

    @property
    def is_empty(self) -> bool:
        """Whether no child is kept."""
        return not self._workers

    def close(self) -> None:
        """Kill the children that were kept."""
        for worker in list(self._workers):
            self._end(worker)

    def leave(self) -> None:
        """In a forked child: let go of the parent's children without touching them."""
        for worker in self._workers:
            worker.pipe.close()
        self._workers.clear()

    def _end(self, worker: _Worker) -> None:
        worker.kill()
        worker.output.close()
        self._workers.remove(worker)

    def _start(self) -> _Worker:
        mine, theirs = connection.Pipe()
        path = [str(self._triton_path.resolve())] if self._triton_path else []
        settings = {"pipe": theirs.fileno(), "cache_dir": str(self._cache_dir)}
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        arguments = [json.dumps(path + sys.path), json.dumps(settings)]
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        return _Worker(process, mine, output, time.monotonic() + _START_S)

    def _step(self) -> None:
        """Hand out jobs, then wait for the next answer, death or deadline."""
        for worker in self._workers:
            if worker.ready and worker.job is None and self._waiting:
                self._give(worker)
        busy = [w for w in self._workers if w.job is not None or not w.ready]
        left = min(w.deadline for w in busy) - time.monotonic()
        answered = connection.wait([w.pipe for w in busy], timeout=max(left, 0.0))
        for worker in busy:
            if worker.pipe in answered:
                self._read(worker)
            elif worker.deadline <= time.monotonic():
                limit = self._timeout_s if worker.ready else _START_S
                self._drop(worker, f"took longer than {limit:g} s and was killed")

    def _give(self, worker: _Worker) -> None:
        worker.job = self._waiting.popleft()
        worker.output_start = os.fstat(worker.output.fileno()).st_size
        worker.deadline = time.monotonic() + self._timeout_s
        # A child that died while idle is met when its answer is read.
        with contextlib.suppress(OSError):
            worker.pipe.send_bytes(pickle.dumps(self._jobs[worker.job]))

    def _read(self, worker: _Worker) -> None:
        try:
            message = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            self._drop(worker)
            return
        if not worker.ready:
            worker.ready = True
            return
        job, worker.job = worker.job, None
        assert job is not None, "a worker answered that had no job"
        if isinstance(message, CompiledKernel):
            self._keep(job, message)
        else:
            self._keep(job, self._failure(job, str(message), worker.last_lines()))

    def _drop(self, worker: _Worker, why: str = "") -> None:
        """Give up a child. Its job failed; if it never came up, it gets no successor."""
        status = worker.kill()
        why = why or _death(status)
        lines = worker.last_lines()
        worker.output.close()
        self._workers.remove(worker)
        if worker.job is not None:
            spec, arch = self._jobs[worker.job]
            text = f"compile: the compiler of kernel '{spec.name}' for {arch} {why}."
            self._keep(worker.job, self._failure(worker.job, text, lines))
            return
        self._wanted = len(self._workers)
        while self._waiting and not self._workers:
            job = self._waiting.popleft()
            spec, arch = self._jobs[job]
            text = f"compile: no compiler came up for kernel '{spec.name}': its process {why}."
            self._keep(job, self._failure(job, text, lines))

    def _failure(self, job: int, text: str, lines: list[str]) -> CompileFailure:
        spec, arch = self._jobs[job]
        quoted = ["The compiler wrote:", *(f"  {line}" for line in lines)] if lines else []
        return CompileFailure(spec.name, arch, "\n".join([text, *quoted]))

    def _keep(self, job: int, result: CompileResult) -> None:
        self._results[job] = result
        if self._on_result is not None:
            self._on_result(result)


def _death(status: int) -> str:
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
