"""Run a recorded run again: the same requests before the same steps, each step as long as it was, and the same plans.

What is computed again is every decision of the scheduler and the cache; tokens stand for the hashes of their blocks.
Must not import torch.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.core.errors import ConfigError
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import SampleRow
from ridgeline.decoding.request import Request
from ridgeline.engine.journal import FINISH_REASONS, KINDS, WAIT_REASONS
from ridgeline.engine.recording import MemoryRecorder, Recording
from ridgeline.engine.request import FinishReason
from ridgeline.explain.simulation import FakeClock, PricedExecutor, simulated_loop

STOP_ID = -1
TAIL = 1 << 40  # tokens from here on are in no whole block: each is its sequence's own
ENDED_FROM_OUTSIDE = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR, FinishReason.REFUSED)
DECIDED = ("num_tokens", "num_spans", "num_rows", "num_copies", "head_waits")


@dataclass(frozen=True, slots=True)
class Replay:
    """Says how many steps of a recorded run came out the same, and how the next one did not; "" where all did."""

    num_steps: int
    num_equal: int
    num_requests: int
    difference: str

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        if not self.difference:
            return f"{self.num_steps:,} steps of {self.num_requests:,} requests: all plans are identical"
        return f"{self.num_equal:,} of {self.num_steps:,} steps are identical; {self.difference}"


class RecordedTokens:
    """Gives tokens to the prompts and outputs of a recording: equal blocks, by their hashes, have equal tokens."""

    def __init__(self, recording: Recording, block_size: int) -> None:
        self._block_size = block_size
        blocks: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}  # by sequence
        self._stops: dict[int, int] = {}  # by sequence, how many tokens it had when it stopped
        for output in recording.outputs:
            seq_id = int(output["seq_id"])
            self._blocks[seq_id] = [blocks.setdefault(h, len(blocks)) for h in recording.hashes_of(output)]
            if FINISH_REASONS[output["reason"]] == FinishReason.STOP:
                self._stops[seq_id] = int(output["num_tokens"]) - int(output["num_prompt"])

    def at(self, seq_id: int, position: int) -> int:
        """Return the token of a sequence at a position."""
        block, offset = divmod(position, self._block_size)
        blocks = self._blocks.get(seq_id, ())
        return blocks[block] * self._block_size + offset if block < len(blocks) else TAIL + (seq_id << 24) + position

    def prompt(self, seq_id: int, num_tokens: int) -> list[int]:
        """Return a sequence's prompt."""
        return [self.at(seq_id, position) for position in range(num_tokens)]

    def sampled(self, row: SampleRow) -> int:
        """Return the token that a row was sampled to."""
        if self._stops.get(row.seq_id) == row.num_output + 1:
            return STOP_ID
        return self.at(row.seq_id, len(row.prompt_ids) + row.num_output)


def recorded_requests(recording: Recording, tokens: RecordedTokens) -> list[tuple[np.void, Request]]:
    """Return the requests of a recording in the order in which they came, each with its first output's record."""
    outputs = sorted(recording.outputs, key=lambda output: int(output["seq_id"]))
    counts: dict[int, int] = defaultdict(int)
    for output in outputs:
        counts[int(output["seq_id"]) - int(output["index"])] += 1
    firsts = (output for output in outputs if not output["index"])
    return [(output, _request(output, counts[int(output["seq_id"])], tokens)) for output in firsts]


def _request(output: np.void, n: int, tokens: RecordedTokens) -> Request:
    seq_id, max_tokens = int(output["seq_id"]), max(1, int(output["max_tokens"]))
    return Request(
        request_id=str(seq_id),
        prompt_ids=tokens.prompt(seq_id, int(output["num_prompt"])),
        params=SamplingParams(temperature=0 if n == 1 else 1, max_tokens=max_tokens, n=n),
        arrival_s=float(output["arrival_s"]),
        seed=0,
        max_tokens=max_tokens,
        stop_ids=frozenset((STOP_ID,)),
        priority=int(output["priority"]),
        client=int(output["client"]),
        call=int(output["call"]),
        adapter=int(output["adapter"]),
        salt=f"adapter {output['adapter']}" if output["adapter"] else "",
    )


def replay(recording: Recording) -> Replay:
    """Run a recording again, and compare plans step by step.

    Raises ConfigError for an engine that cannot be simulated, and for requests that had not ended.
    """
    setup, steps = recording.setup, recording.steps
    if setup is None or not len(steps):
        raise ConfigError(
            "the recording does not say how its engine was set up, or has no steps: it cannot be replayed"
        )
    _require_ended(recording)
    tokens = RecordedTokens(recording, setup.layout.block_size)
    clock, recorder = FakeClock(), MemoryRecorder(setup)
    lasting = iter(steps["run_s"].tolist())
    executor = PricedExecutor(clock, setup.depth, lambda plan: next(lasting), tokens.sampled)
    loop = simulated_loop(setup, executor, clock, lambda deltas: None, recorder)
    requests = recorded_requests(recording, tokens)
    coming, ending = _by_step(recording, requests)
    for number in range(len(steps)):
        clock.now_s = float(steps["start_s"][number] + steps["plan_s"][number])
        for request in coming[number]:
            loop.submit(request)
        loop.process_input_queue()
        for request_id, index in ending[number]:
            loop.scheduler.finish(request_id, index, FinishReason.ABORT)
        if not loop.step():
            break
    again = recorder.recording(loop.journal)
    equal, difference = _compare(recording, again)
    return Replay(len(steps), equal, len(requests), difference)


def _by_step(
    recording: Recording, requests: list[tuple[np.void, Request]]
) -> tuple[Mapping[int, list[Request]], Mapping[int, list[tuple[str, int]]]]:
    """Return which requests came before each step, and which outputs were ended from outside before it."""
    coming: defaultdict[int, list[Request]] = defaultdict(list)
    ending: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for output, request in requests:
        coming[int(output["first_step"])].append(request)
    for output in recording.outputs:
        reason, index = FINISH_REASONS[output["reason"]], int(output["index"])
        if reason in ENDED_FROM_OUTSIDE:
            failed = reason in (FinishReason.ERROR, FinishReason.REFUSED)  # within a step, whose record came later
            ending[int(output["last_step"]) + failed].append((str(int(output["seq_id"]) - index), index))
    return coming, ending


def _require_ended(recording: Recording) -> None:
    ended = set(recording.outputs["seq_id"].tolist())
    open_ids = sorted(set(recording.spans["seq_id"].tolist()) - ended)
    if open_ids:
        raise ConfigError(
            f"{len(open_ids)} sequences of the journal had not ended when it was closed (the first is {open_ids[0]}): "
            "a run can be replayed once all its requests have ended"
        )


def _compare(recorded: Recording, again: Recording) -> tuple[int, str]:
    """Return how many steps are equal, and what the first other one is; "" where there is none."""
    blocks = [name for name in recorded.steps.dtype.names or () if name.startswith(("free_", "cached_", "used_"))]
    decisions, decided_again = _decisions(recorded), _decisions(again)
    for number, step in enumerate(recorded.steps):
        if number >= len(again.steps):
            return number, f"there is nothing to compute in step {step['step']}"
        other = again.steps[number]
        spans, spans_again = recorded.spans_of(step).tolist(), again.spans_of(other).tolist()
        if spans != spans_again:
            pair = next((p for p in zip(spans, spans_again) if p[0] != p[1]), (len(spans), len(spans_again)))
            return number, f"step {step['step']} computed {pair[0]}, and computes {pair[1]} again"
        for name in (*DECIDED, *blocks):
            if step[name] != other[name]:
                was, now = step[name], other[name]
                if name == "head_waits":
                    was, now = WAIT_REASONS[was] or "nothing", WAIT_REASONS[now] or "nothing"
                return number, f"{name} of step {step['step']} was {was}, and is {now} again"
        if decisions[int(step["step"])] != decided_again[int(other["step"])]:
            return number, f"step {step['step']} decided otherwise whom to admit or preempt"
    return len(recorded.steps), ""


def _decisions(recording: Recording) -> Mapping[int, list[tuple[str, int, int]]]:
    found: defaultdict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for decision in recording.decisions:
        found[int(decision["step"])].append((KINDS[decision["kind"]], int(decision["seq_id"]), int(decision["value"])))
    return found
