"""The journal: what the engine did in its last steps, with when and why, and totals since the start.

Rings of preallocated numpy records with one writer, the loop; there is no token and no text in them. Readers, in any
thread, copy records and drop those that were written over meanwhile: nobody takes a lock.

A decode step that is the one before with every sequence one token on keeps that step's spans: `span_shift` says how
many tokens on they are.
"""

import math
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ridgeline.core.host import HostSample
from ridgeline.core.step import StepPlan, StepResult, WaitReason
from ridgeline.cost.efficiency import Behind
from ridgeline.decoding.request import SLOTS, Request
from ridgeline.engine.request import FinishEvent, FinishReason
from ridgeline.program.pricing import Load

Records = npt.NDArray[np.void]
Kind = Literal["admitted", "preempted"]

HOST_PERIOD_S = 1.0
KINDS: tuple[Kind, ...] = get_args(Kind)
WAIT_REASONS: tuple[str, ...] = ("", *get_args(WaitReason))  # "": nobody waited
_WAIT_CODES = {reason or None: code for code, reason in enumerate(WAIT_REASONS)}
FINISH_REASONS: tuple[str, ...] = tuple(FinishReason)

SECONDS = ("plan_s", "batch_s", "run_s", "sample_s", "commit_s", "render_s")
STEP_FIELDS = (
    ("step", "i8"),
    ("start_s", "f8"),
    *((name, "f8") for name in SECONDS),  # NaN: not told apart from run_s; the last render_s may grow
    ("first_span", "i8"),  # number of its first span record
    ("span_shift", "i4"),  # tokens to add to `start` of its span records
    *((name, "i4") for name in ("num_tokens", "num_spans", "num_rows", "num_copies")),
    ("head_waits", "i4"),  # index into WAIT_REASONS
    ("client_slots", "i4"),  # that a client might have of them; -1: all
    ("num_rounds", "i4"),  # of drafting and verifying
)
SPAN_FIELDS = (
    ("seq_id", "i8"),
    # num_further: tokens and rows that are only of rounds behind the first, as many as there may be
    *((name, "i4") for name in ("start", "num_tokens", "num_rows", "num_final", "num_further", "adapter")),
)
DECISION_FIELDS = (
    ("step", "i8"),
    ("kind", "i4"),  # index into KINDS
    ("seq_id", "i8"),
    ("value", "i8"),  # admitted: cached tokens; preempted: the sequence that got its blocks
    ("reason", "i4"),  # admitted: index into Journal.cache_reasons
)
OUTPUT_FIELDS = (
    ("seq_id", "i8"),
    ("arrival_s", "f8"),
    *((name, "f8") for name in ("queue_s", "ttft_s", "latency_s")),  # NaN: it did not come so far
    *((name, "i4") for name in ("index", "num_prompt", "num_cached", "num_output", "num_preemptions")),
    *((name, "i4") for name in ("max_tokens", "adapter", "greedy", "logprobs", "needs_history")),
    ("priority", "i4"),
    ("client", "i8"),
    ("call", "i8"),
    ("num_tokens", "i4"),  # prompt and output, with tokens that callers do not get
    ("first_step", "i8"),  # how many steps there had been when it came, and when it ended
    ("last_step", "i8"),
    ("reason", "i4"),  # index into FINISH_REASONS
    ("first_hash", "i8"),  # number of its first hash record
    ("num_hashes", "i4"),
)
PROMPT_FIELDS = (("hash", "i8"), ("own", "i8"))  # of a block of a prompt and its output: all before it too, or not
AROUND_FIELDS = (  # what others know of it; NaN: not told
    ("time_s", "f8"),
    ("loop_lag_s", "f8"),  # how late a server's event loop was, in all
    ("huge_page_bytes", "f8"),  # of the process
    ("remote_share", "f8"),  # of what its cores read, as `core/host.py:remote_share` has it
)
HOST_FIELDS = (("time_s", "f8"), *((name, "f8") for name in HostSample._fields))
_OF_STEPS = {"steps": STEP_FIELDS, "spans": SPAN_FIELDS, "decisions": DECISION_FIELDS}
FIELDS = _OF_STEPS | {"outputs": OUTPUT_FIELDS, "prompts": PROMPT_FIELDS, "host": HOST_FIELDS, "around": AROUND_FIELDS}
CAPACITIES = dict.fromkeys(FIELDS, 4096) | {"spans": 65536, "decisions": 16384, "prompts": 65536}
SAME_S = 1e-6  # between times that are the same, and were added up
FLUSH_STEPS = min(256, CAPACITIES["steps"] // 4)


def load_of(spans: Records) -> Load:
    """Return what a step of these spans has to compute, or the first of its rounds."""
    lengths = spans["num_tokens"] - spans["num_further"]
    ends, num_rows = spans["start"] + lengths, spans["num_rows"] - spans["num_further"]
    return Load(tuple(zip(lengths.tolist(), ends.tolist())), int(num_rows.sum()))


def planned_load(plan: StepPlan) -> Load:
    """Return what a plan has to compute."""
    spans = [(len(span.token_ids), span.end) for span in plan.spans]
    return Load(tuple(spans), sum([span.num_logit_rows for span in plan.spans]))


def step_seconds(steps: Records, depth: int) -> npt.NDArray[np.float64]:
    """Return what steps took; with an executor's `depth` above 1, from the end of the one before to its own.

    Between these may be time without work; of this, what it took to take the one in and plan the other counts.
    """
    run_s, plan_s, behind_s = steps["run_s"], steps["plan_s"], steps["commit_s"] + steps["render_s"]
    if depth == 1:
        return plan_s + run_s + behind_s
    return run_s + np.append(0.0, np.clip(_between_s(steps), 0.0, plan_s[1:] + behind_s[:-1]))


def _between_s(steps: Records) -> npt.NDArray[np.float64]:
    """Return the seconds from the end of each step to when the next one began: 0 where that was planned before."""
    return np.diff(steps["start_s"] + steps["plan_s"]) - steps["run_s"][:-1]


def timed_steps(steps: Records, spans: Records, depth: int) -> Iterator[tuple[Load, Behind, float]]:
    """Yield what each step computed, what is around it, and its seconds; `spans` begin with the first one's.

    Several rounds are as many steps, of which one is yielded. Where planning took no time, as in a simulation, nothing
    tells when the next one was planned.
    """
    last, before, num_tokens = set[int](), 0, 0
    is_ahead_N = (_between_s(steps) < SAME_S) & (steps["plan_s"][1:] > 0) & (depth > 1)
    plans_N = np.append(is_ahead_N & (steps["span_shift"][1:] == 0), False)
    for step, seconds, plans in zip(steps, step_seconds(steps, depth).tolist(), plans_N.tolist()):
        found = spans_of(step, spans, int(steps["first_span"][0]))
        seq_ids = set(found["seq_id"].tolist())
        age = int(step["span_shift"])
        before = before if age else num_tokens
        behind = Behind(age, not last <= seq_ids, plans, len(seq_ids - last), before)
        yield load_of(found), behind, seconds / int(step["num_rounds"])
        last, num_tokens = seq_ids, int(step["num_tokens"])


def spans_of(step: np.void, spans: Records, first: int = 0) -> Records:
    """Return the spans of a step record, as they were in that step; number `first` is the first one of `spans`."""
    begin = int(step["first_span"]) - first
    found = spans[begin : begin + int(step["num_spans"])].copy()
    found["start"] += step["span_shift"]
    return found


class Ring:
    """The last `capacity` records of one kind. Record number n stands at n % capacity."""

    def __init__(self, fields: Sequence[tuple[str, str]], capacity: int) -> None:
        dtype = np.dtype([(name, "<" + kind) for name, kind in fields])
        packing = struct.Struct("<" + "".join({"i8": "q", "i4": "i", "f8": "d"}[kind] for _, kind in fields))
        self._pack_into, self._size = packing.pack_into, packing.size
        assert self._size == dtype.itemsize
        self._memory = bytearray(capacity * self._size)
        self._records: Records = np.frombuffer(self._memory, dtype=dtype)
        self.capacity = capacity
        self.num_written = self._num_begun = 0  # _num_begun: with those that `take` is writing

    def append(self, *values: Any) -> None:
        """Write one record, its values in the order of the fields."""
        self._pack_into(self._memory, self.num_written % self.capacity * self._size, *values)
        self.num_written += 1

    def add_to_last(self, name: str, value: float) -> None:
        """Add to a field of the last record."""
        self._records[name][(self.num_written - 1) % self.capacity] += value

    def take(self, first: int, data: bytes) -> None:
        """Write the records of another ring from its number `first` on, all that it has since the last ones."""
        records = np.frombuffer(data, self._records.dtype)
        self._num_begun = first + len(records)
        self._records[np.arange(first, first + len(records)) % self.capacity] = records
        self.num_written = self._num_begun

    def read(self, since: int = 0) -> tuple[int, Records]:
        """Return (number of the first, copies) of the records from number `since` on still there; any thread."""
        end = self.num_written
        first = max(since, end - self.capacity, 0)
        records = self._records[np.arange(first, end) % self.capacity]
        begun = max(self._num_begun, self.num_written + 1)  # + 1: one may be half written
        lost = max(0, begun - self.capacity - first)
        return first + lost, records[lost:]


@dataclass(slots=True)
class Totals:
    """Sums since the start."""

    plan_s: float = 0.0
    run_s: float = 0.0
    commit_s: float = 0.0
    render_s: float = 0.0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_requests: int = 0


class Journal:
    """Records what the loop writes at the end of each step. `num_groups` is the number of cache groups.

    Prompts are recorded as hashes of their blocks of `block_size` tokens, with a key of this process: who reads them
    sees which prompts began alike, and cannot guess their tokens.
    """

    def __init__(self, num_groups: int, block_size: int) -> None:
        blocks = [(f"{state}_{group}", "i4") for group in range(num_groups) for state in ("free", "cached", "used")]
        fields = FIELDS | {"steps": (*STEP_FIELDS, *blocks)}
        self.rings = {name: Ring(fields[name], CAPACITIES[name]) for name in FIELDS}
        self.steps, self.spans, self.decisions, self.outputs, self.prompts, self.host, self.around = self.rings.values()
        self.block_size = block_size
        self._key = secrets.token_bytes(16)
        self._next_host_s = -math.inf
        self.cache_reasons: list[str] = []  # why the prefix cache served no more; grows only
        self._totals = Totals()
        self._last_seq_ids: list[int] = []  # of a step of one token and one row for each sequence, else empty
        self._first_span = self._shift = 0
        self._unfinished: dict[str, tuple[int, int]] = {}  # by request: steps before it came, outputs not ended
        self._last_step = self._last_tokens = -1  # of the last step, and its tokens where it was one for each sequence

    def totals(self) -> Totals:
        """Return a copy of the totals; any thread."""
        return replace(self._totals)

    def request(self, request: Request) -> None:
        """Count a request that came."""
        self._totals.num_requests += 1
        self._unfinished[request.request_id] = self.steps.num_written, request.params.n

    def sample_host(self, now_s: float, read: Callable[[], HostSample]) -> None:
        """Record the machine's counters, if the last ones are a second old."""
        if now_s >= self._next_host_s:
            self._next_host_s = now_s + HOST_PERIOD_S
            self.host.append(now_s, *read())

    def step(
        self,
        plan: StepPlan,
        result: StepResult,
        times_s: tuple[float, float, float, float, float],
        blocks: Sequence[int],
        num_final: Mapping[int, int],
        client_slots: int | None = None,
    ) -> None:
        """Record one step: when planning began, computing began and ended, committing and rendering ended.

        `blocks`: free, cached and used ones of each group. `num_final` has the sequences of which less than the span is
        final.
        """
        start_s, planned_s, ran_s, committed_s, end_s = times_s
        spans, samples, decisions = plan.spans, result.samples, plan.decisions
        if plan.follows == self._last_step and self._last_tokens == len(spans):
            num_rows = num_tokens = len(spans)
            num_further, self._shift = 0, self._shift + 1
        else:
            num_further = sum([span.num_further for span in spans])
            num_tokens, num_rows = self._anew(plan, plan.num_tokens + num_further, num_final)
        self._last_step, self._last_tokens = plan.step, len(spans) if num_tokens == num_rows == len(spans) else -1
        if decisions.admitted or decisions.preempted:
            self._decisions(plan)
        planning_s, computing_s = planned_s - start_s, ran_s - planned_s
        committing_s, rendering_s = committed_s - ran_s, end_s - committed_s
        taken_s = planning_s, result.batch_s, computing_s, result.sample_s, committing_s, rendering_s
        slots = -1 if client_slots is None else client_slots
        counts = num_tokens, len(spans), num_rows, len(plan.copies), _WAIT_CODES[decisions.head_waits], slots
        counts = (*counts, result.num_rounds)
        self.steps.append(plan.step, start_s, *taken_s, self._first_span, self._shift, *counts, *blocks)
        totals = self._totals
        totals.plan_s += planning_s
        totals.run_s += computing_s
        totals.commit_s += committing_s
        totals.render_s += rendering_s
        totals.num_steps += 1
        others = result.num_rounds - result.num_alike + result.lookups.num_drafted  # each has rows of its own
        totals.num_computed_tokens += (num_tokens - num_further) * result.num_alike + others
        totals.num_sampled_tokens += len(samples) * result.num_alike + others

    def rendered(self, seconds: float) -> None:
        """Record that what was left to render of the last step took so long."""
        self._totals.render_s += seconds
        self.steps.add_to_last("render_s", seconds)

    def finish(self, event: FinishEvent, num_steps: int) -> None:
        """Record the end of an output, before which there had been so many steps."""
        request, timings, params = event.request, event.timings, event.request.params
        nan = float("nan")
        first_step, num_open = self._unfinished.pop(request.request_id, (0, 1))
        if num_open > 1:
            self._unfinished[request.request_id] = first_step, num_open - 1
        came = event.seq_id, request.arrival_s
        taken_s = timings.queue_s, nan if timings.ttft_s is None else timings.ttft_s, timings.latency_s
        num_cached, num_logprobs = event.cached.num_tokens, -1 if params.logprobs is None else params.logprobs
        counts = event.index, len(request.prompt_ids), num_cached, event.num_output, timings.num_preemptions
        max_tokens = min(request.max_tokens, 2**31 - 1)
        asked = max_tokens, request.adapter % SLOTS, params.greedy, num_logprobs, params.needs_history
        client, num_tokens = (request.priority, request.client, request.call), len(event.token_ids)
        end = first_step, num_steps, FINISH_REASONS.index(event.reason)
        hashes = self.prompts.num_written, self._hash(request, event.token_ids)
        self.outputs.append(*came, *taken_s, *counts, *asked, *client, num_tokens, *end, *hashes)

    def _hash(self, request: Request, token_ids: Sequence[int]) -> int:
        """Write the hashes of the whole blocks of a prompt and its output; return how many there are."""
        size, ids = self.block_size, np.asarray(token_ids, dtype=np.int64)
        chain = blake2b(request.salt.encode(), key=self._key, digest_size=8)
        empty = chain.copy()
        for begin in range(0, len(ids) - size + 1, size):
            block, own = ids[begin : begin + size].tobytes(), empty.copy()
            for each in (chain, own):
                each.update(block)
            self.prompts.append(*(int.from_bytes(each.digest(), "little", signed=True) for each in (chain, own)))
        return len(ids) // size

    def _anew(self, plan: StepPlan, num_tokens: int, num_final: Mapping[int, int]) -> tuple[int, int]:
        """Write the plan's spans, unless they are those of the last step one token on; return tokens and rows."""
        seq_ids = [span.seq_id for span in plan.spans]
        one_each = num_tokens == len(seq_ids) == len(plan.samples)
        if one_each and seq_ids == self._last_seq_ids and not plan.decisions.admitted:
            self._shift += 1
            return num_tokens, num_tokens
        num_rows = self._spans(plan, num_final)
        self._last_seq_ids = seq_ids if one_each and num_rows == num_tokens else []
        return num_tokens, num_rows

    def _spans(self, plan: StepPlan, num_final: Mapping[int, int]) -> int:
        """Write the plan's spans; return their rows of logits."""
        self._first_span, self._shift = self.spans.num_written, 0
        num_rows = 0
        append = self.spans.append
        for span in plan.spans:
            further = span.num_further
            count, rows, seq_id = len(span.token_ids) + further, span.num_logit_rows + further, span.seq_id
            append(seq_id, span.start, count, rows, num_final.get(seq_id, count), further, span.adapter % SLOTS)
            num_rows += rows
        return num_rows

    def _decisions(self, plan: StepPlan) -> None:
        for admission in plan.decisions.admitted:
            if admission.reason not in self.cache_reasons:
                self.cache_reasons.append(admission.reason)
            reason = self.cache_reasons.index(admission.reason)
            self.decisions.append(plan.step, 0, admission.seq_id, admission.num_cached, reason)
        for preemption in plan.decisions.preempted:
            self.decisions.append(plan.step, 1, preemption.seq_id, preemption.for_seq_id, -1)


class Recorder(ABC):
    """Keeps what a journal's rings cannot: follows it from its first step on, and must look often."""

    def __init__(self) -> None:
        self._next = dict.fromkeys(FIELDS, 0)

    def __call__(self, journal: Journal) -> None:
        """Look at the journal, after a step; take in what is new now and then."""
        new = {name: ring.num_written - self._next[name] for name, ring in journal.rings.items()}
        if new["steps"] >= FLUSH_STEPS or any(new[name] > CAPACITIES[name] // 4 for name in FIELDS):
            self.flush(journal)

    def flush(self, journal: Journal) -> None:
        """Take in all that is new."""
        for name, ring in journal.rings.items():
            first, records = ring.read(self._next[name])
            if self._next[name] == ring.num_written:
                continue
            follows = first == self._next[name] or name in ("host", "around")
            assert follows, f"{name}: records were written over before they were read"
            self._next[name] = ring.num_written
            self._take(name, records, journal)

    @abstractmethod
    def _take(self, name: str, records: Records, journal: Journal) -> None:
        """Keep new records of a ring."""

    @abstractmethod
    def close(self) -> None:
        """Keep what is left: no step comes any more."""
