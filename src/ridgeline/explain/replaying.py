"""Run a recorded run again: the same requests before the same steps, each step as long as it was, and the same plans.

What is computed again is every decision of the scheduler and the cache; tokens stand for the hashes of their blocks.
How many tokens were drafted, and how many of them were right, is as it was.
Must not import torch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.errors import ConfigError
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import SampledToken, SampleRow, Span, StepPlan, StepResult
from ridgeline.core.words import counted
from ridgeline.decoding.request import Request
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.decoding.strategy import Accepted, Room, SequenceView, rows_along, sample_row
from ridgeline.engine.journal import FINISH_REASONS, KINDS, WAIT_REASONS
from ridgeline.engine.recording import MemoryRecorder, Recording, recording_of
from ridgeline.engine.request import FinishReason
from ridgeline.engine.sharing import SlotCap
from ridgeline.explain.exploration import frame, html_table
from ridgeline.explain.simulation import FakeClock, PricedExecutor, simulated_loop

STOP_ID = -1
TAIL = 1 << 40  # tokens from here on are in no whole block: each is its sequence's own
ENDED_FROM_OUTSIDE = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR, FinishReason.REFUSED)
REPLAYED = ("autoregressive", "speculative")
DRAFT_TREES = ("lookahead", "medusa")  # which the records of spans do not have
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
        steps = counted(self.num_steps, "step")
        if not self.difference:
            return f"{steps} of {counted(self.num_requests, 'request')}: all plans are identical"
        return f"{self.num_equal:,} of {steps} came out identical; {self.difference}"

    def to_pandas(self) -> Any:
        """Return the counts as a pandas.DataFrame of one record. Raises ConfigError without pandas."""
        return frame([asdict(self)])

    def _repr_html_(self) -> str:
        return html_table(self.sentence, list(asdict(self)), [list(map(str, asdict(self).values()))])


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
        return self.output(row.seq_id, len(row.prompt_ids), row.num_output)

    def output(self, seq_id: int, num_prompt: int, index: int) -> int:
        """Return a token of an output, behind a prompt of so many."""
        return STOP_ID if self._stops.get(seq_id) == index + 1 else self.at(seq_id, num_prompt + index)


class RecordedDrafts(Autoregressive):
    """Drafts in each step what was drafted in it, and accepts as much of it as was accepted."""

    rolls_back = True

    def __init__(self, recording: Recording, tokens: RecordedTokens) -> None:
        spans, steps = recording.spans, recording.steps
        drafted = np.flatnonzero(spans["num_rows"] > 1)  # none of these is that of more than one step
        owners = np.searchsorted(steps["first_span"], drafted, side="right") - 1
        told = zip(owners.tolist(), spans[drafted][["seq_id", "num_rows", "num_further", "num_final"]].tolist())
        self._drafts = {(step, seq_id): (rows - 1 - more, more, final) for step, (seq_id, rows, more, final) in told}
        self._drafting = set(owners.tolist())
        ends_s = steps["start_s"] + steps["plan_s"]
        # A step that was planned ahead began as the one before it ended; any other after that was taken in.
        self._ahead = [False, *(np.abs(ends_s[1:] - ends_s[:-1] - steps["run_s"][:-1]) < 1e-7).tolist()]
        self._tokens, self._num_landed, self._is_ahead = tokens, 0, False

    @property
    def one_token(self) -> bool:
        return self._step not in self._drafting

    @property
    def _step(self) -> int:
        """The step that is planned."""
        return self._num_landed + self._is_ahead

    def ahead(self, running: Sequence[SequenceView]) -> bool:
        self._is_ahead = self._num_landed + 1 < len(self._ahead) and self._ahead[self._num_landed + 1]
        return self._is_ahead

    def begin(self, running: Sequence[SequenceView], room: Room) -> None:
        """Do nothing: what is drafted is known."""

    def next_span(self, view: SequenceView, max_tokens: int, *, score_all: bool) -> Span | None:
        span = super().next_span(view, max_tokens, score_all=score_all)
        drafted, further, _ = self._drafts.get((self._step, view.seq_id), (0, 0, 0))
        if span is None or not drafted or span.end < len(view.token_ids):
            return span
        token_ids = [*span.token_ids, *(self._tokens.at(view.seq_id, span.end + i) for i in range(drafted))]
        rows = {"num_logit_rows": 1 + drafted, "num_optional": drafted, "num_further": further}
        return span._replace(token_ids=token_ids, **rows)

    def rows(self, view: SequenceView, span: Span, first_row: int) -> Sequence[SampleRow]:
        if not span.num_optional:
            return super().rows(view, span, first_row)
        first, drafted = sample_row(view, first_row), span.token_ids[span.num_tokens - span.num_optional :]
        return rows_along(first, drafted)

    def accept(self, view: SequenceView, span: Span, sampled: Sequence[SampledToken]) -> Accepted:
        if not span.num_optional:
            return Accepted(sampled, span.num_tokens)
        *_, num_final = self._drafts.get((self._num_landed, view.seq_id), (0, 0, span.num_tokens))
        num_prompt, first = len(view.request.prompt_ids), len(view.token_ids)
        indices = range(first - num_prompt, span.start + num_final + 1 - num_prompt)  # of all rounds
        token_ids = [self._tokens.output(view.seq_id, num_prompt, index) for index in indices]
        return Accepted([SampledToken(view.seq_id, token_id) for token_id in token_ids], num_final, "recorded")

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self._num_landed, self._is_ahead = self._num_landed + 1, False


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
        params=SamplingParams(
            temperature=0 if n == 1 else 1,
            max_tokens=max_tokens,
            n=n,
            presence_penalty=float(output["needs_history"]),  # nothing is planned ahead of what it counts
        ),
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


def replay(journal: Recording | Path | str) -> Replay:
    """Run a recording, or the file of one, again, and compare plans step by step.

    Raises ConfigError for an engine that cannot be simulated, and for requests that had not ended.
    """
    recording = recording_of(journal)
    setup, steps = recording.setup, recording.steps
    if setup is None or not len(steps):
        raise ConfigError(
            "the recording does not say how its engine was set up, or has no steps: it cannot be replayed"
        )
    if setup.strategy not in REPLAYED:
        raise ConfigError(f"only engines that continue text can be simulated; this one decodes by {setup.strategy}")
    if trees := [name for name in setup.config.speculation.proposers() if name in DRAFT_TREES]:
        raise ConfigError(f"{trees[0]} drafts trees, and a journal has only the number of their tokens: no replay")
    _require_ended(recording)
    tokens = RecordedTokens(recording, setup.layout.block_size)
    clock, recorder = FakeClock(), MemoryRecorder(setup)
    lasting = iter(steps["run_s"].tolist())
    executor = PricedExecutor(clock, setup.depth, lambda plan: next(lasting), tokens.sampled)
    drafted = setup.strategy == "speculative" or (recording.spans["num_rows"] > 1).any()
    drafts = RecordedDrafts(recording, tokens) if drafted else None
    loop = simulated_loop(setup, executor, clock, lambda deltas: None, recorder, drafts)
    loop.scheduler.cap = RecordedSlots(recording)
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
    equal, difference = _compare(recording, recorder.recording(loop.journal))
    return Replay(len(steps), equal, len(requests), difference)


class RecordedSlots(SlotCap):
    """Bounds clients as they were: what decided that hangs on the clock."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        steps = recording.steps
        self._slots = dict(zip(steps["step"].tolist(), steps["client_slots"].tolist()))

    def slots(self, step: int, now_s: float) -> int | None:
        """Return what is recorded of a step."""
        slots = self._slots.get(step, -1)
        return None if slots < 0 else slots


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
            f"{counted(len(open_ids), 'sequence')} of the journal had not ended when it was closed "
            f"(the first is {open_ids[0]}): "
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
