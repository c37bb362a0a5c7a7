"""The engines as the comparison sees them: a system is an engine with weights of some bits, run as fresh processes."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from benchmarks.peers.workload import START, Cell, PromptSource, measure

DRIVERS = Path(__file__).resolve().parent / "drivers"
LOG_TAIL_LINES = 15

Prompts = Callable[[Cell], PromptSource]
OnValue = Callable[[Cell, float], None]


class SystemFailed(Exception):
    """An engine did not do what it was asked for; the comparison goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an engine is started with."""

    model: Path
    threads: int
    max_model_len: int
    max_num_seqs: int
    options: dict[str, object] = field(default_factory=dict)


class Runner(Protocol):
    """How a system is run."""

    def run(self, cells: Sequence[Cell], prompts: Prompts, on_value: OnValue) -> dict[str, str]:
        """Measures in fresh processes those cells that it can, and returns versions. Raises SystemFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`bits` of a weight decide who is compared with whom; `weights` says exactly what they are."""

    engine: str
    bits: int
    weights: str
    options: dict[str, object]
    runner: Runner

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEngine:
    """An engine behind one of the drivers, run by the interpreter that it is installed for."""

    python: Path
    driver: str
    job: Job
    timeout_s: float

    def run(self, cells: Sequence[Cell], prompts: Prompts, on_value: OnValue) -> dict[str, str]:
        """One process for all cells. A start is measured with the page cache as it is."""
        start = next((cell for cell in cells if cell.kind == "start"), START)
        first_prompt = prompts(start).draw(1, start.input_tokens)
        with Worker([str(self.python), str(DRIVERS / self.driver)], self.timeout_s) as worker:
            versions = worker.start(self.job)
            worker.ask(first_prompt, 1)
            start_s = worker.age_s()
            for cell in cells:
                on_value(cell, start_s if cell.kind == "start" else measure(cell, worker.ask, prompts(cell)))
        return versions


class Worker:
    """A driver's process. It is killed when `timeout_s` have passed since its start."""

    def __init__(self, command: list[str], timeout_s: float) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed with the worker
        self._started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
            )
        except OSError as error:
            raise _cannot_run(command[0], error) from None
        self._watchdog = threading.Timer(timeout_s, self._process.kill)
        self._watchdog.start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self._watchdog.cancel()
        if exception[0] is not None:
            self._process.kill()
        self._process.communicate()
        self._log.close()

    def age_s(self) -> float:
        """Since the process was started."""
        return time.perf_counter() - self._started

    def start(self, job: Job) -> dict[str, str]:
        """Loads the model, and returns versions."""
        settings = {name: getattr(job, name) for name in ("threads", "max_model_len", "max_num_seqs", "options")}
        return self._exchange({"model": str(job.model), **settings})["versions"]

    def ask(self, prompts: list[list[int]], output_tokens: int) -> float:
        """Seconds for all of them. Raises SystemFailed for outputs of another length."""
        reply = self._exchange({"prompts": prompts, "output_tokens": output_tokens})
        lengths = [each if isinstance(each, int) else len(each) for each in reply["output_tokens"]]
        if lengths != [output_tokens] * len(prompts):
            raise SystemFailed(f"outputs of {lengths} tokens where {output_tokens} were asked for")
        return reply["duration_s"]

    def _exchange(self, message: dict[str, object]) -> dict:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            print(*tail, sep="\n", file=sys.stderr)
            raise SystemFailed(f"the process ended with exit code {self._process.wait()}")
        return json.loads(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCpp:
    """llama.cpp by its own benchmarks, which take no token ids: cells that they have no counterpart of are left out."""

    binaries: Path
    gguf: Path
    threads: int
    timeout_s: float

    def run(self, cells: Sequence[Cell], prompts: Prompts, on_value: OnValue) -> dict[str, str]:
        """A process for every cell."""
        versions: dict[str, str] = {}
        for cell in cells:
            if (command := self.command(cell)) is not None:
                rows = self._rows(command)
                on_value(cell, self.value(cell, rows[-1]))
                if "build_commit" in rows[-1]:
                    versions["llama.cpp"] = f"{rows[-1]['build_commit']} ({rows[-1]['build_number']})"
        return versions

    def command(self, cell: Cell) -> list[str] | None:
        """What measures the cell; None: nothing does."""
        shared = ["-m", str(self.gguf), "-t", str(self.threads)]
        bench = [str(self.binaries / "llama-bench"), *shared, "-r", "1", "-o", "jsonl"]
        batched = [str(self.binaries / "llama-batched-bench"), *shared, "--output-format", "jsonl"]
        sizes = ["-npp", cell.input_tokens, "-ntg", cell.output_tokens, "-npl", cell.requests]
        context = ["-c", cell.requests * (cell.input_tokens + cell.output_tokens)]
        match cell.kind:
            case "prefill":
                command = [*bench, "-p", cell.input_tokens, "-n", 0]
            case "decode" if cell.requests == 1:
                command = [*bench, "-p", 0, "-n", cell.output_tokens, "-d", cell.input_tokens]
            case "decode" | "serve":
                command = [*batched, *sizes, *context]
            case "start" | "prefix":
                return None
        return [str(part) for part in command]

    @staticmethod
    def value(cell: Cell, row: dict) -> float:
        """The cell's value from a line of a benchmark's output."""
        if "avg_ts" in row:
            return row["avg_ts"]
        if cell.kind == "decode":
            return row["speed_tg"]
        return cell.requests * cell.output_tokens / (row["t_pp"] + row["t_tg"])

    def _rows(self, command: list[str]) -> list[dict]:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            raise SystemFailed(f"nothing within {self.timeout_s:.0f} s") from None
        except OSError as error:
            raise _cannot_run(command[0], error) from None
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not rows:
            print(*done.stderr.splitlines()[-LOG_TAIL_LINES:], sep="\n", file=sys.stderr)
            raise SystemFailed(f"{Path(command[0]).name} ended with exit code {done.returncode}")
        return rows


def _cannot_run(program: str, error: OSError) -> SystemFailed:
    """Without the folder, which is no part of a result."""
    return SystemFailed(f"cannot run {Path(program).name}: {error.strerror}")
