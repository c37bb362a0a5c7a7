"""The workload of a recording, to be simulated: its requests, what it has of others, and which prefixes were cached.

A server records its last steps only, so it began with a queue and a cache that were not empty. Users that ask as soon
as they are answered would ask sooner of a faster engine: what they send is simulated so. Must not import torch.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.bench.workload import BenchRequest
from ridgeline.engine.recording import Recording
from ridgeline.explain.closed_loop import Users, users_of
from ridgeline.explain.evidence import Evidence
from ridgeline.explain.machine import SimulatedMachine
from ridgeline.explain.pace import Pace, as_predicted
from ridgeline.explain.replaying import TAIL, RecordedTokens, recorded_requests
from ridgeline.explain.simulation import Simulation, run_simulated


@dataclass(frozen=True, slots=True)
class RecordedWorkload:
    """Holds the requests that were recorded whole, in order of arrival, each as long as its first output was; `in_part`
    those that came before the first step, or had not ended; and the prompts that were `cached` beforehand.
    """

    whole: Sequence[BenchRequest]
    in_part: Sequence[BenchRequest]
    cached: Sequence[Sequence[int]]
    users: Users | None = None

    @classmethod
    def of(cls, recording: Recording, block_size: int) -> "RecordedWorkload":
        """Read the workload of a recording whose blocks have so many tokens."""
        tokens, start_s = RecordedTokens(recording, block_size), recording.began_s
        most = recording.setup.max_model_len if recording.setup else sys.maxsize
        whole = [
            BenchRequest(
                prompt=list(request.prompt_ids),
                max_tokens=max(1, int(output["num_tokens"]) - int(output["num_prompt"])),
                arrival_s=request.arrival_s - start_s,
            )
            for output, request in recorded_requests(recording, tokens)
        ]
        in_part, cached = list(_in_part(recording, most)), list(_cached(recording, tokens, block_size))
        return cls(sorted(whole, key=_came_s), in_part, cached, _users(recording, in_part))

    def at_once(self) -> "RecordedWorkload":
        """Return the same, with all requests there when it begins."""
        whole, in_part = ([replace(each, arrival_s=0.0) for each in some] for some in (self.whole, self.in_part))
        return replace(self, whole=whole, in_part=in_part, users=None)

    def sorted_prompts(self, evidence: Evidence) -> "RecordedWorkload":
        """Return the same, with the blocks first in each prompt that most prompts have."""
        return replace(self, whole=evidence.sorted_prompts(self.whole))

    def run(
        self, machine: SimulatedMachine, pace: Pace = as_predicted, max_concurrency: int | None = None
    ) -> Simulation:
        """Return the simulation of it on a machine: its users ask as they are answered, all others when they did."""
        requests, think_s = sorted([*self.whole, *self.in_part], key=_came_s), 0.0
        if self.users is not None:
            requests = [replace(each, arrival_s=0.0) for each in requests]
            max_concurrency, think_s = self.users
        return run_simulated(
            machine, requests, pace=pace, max_concurrency=max_concurrency, think_s=think_s, cached=self.cached
        )


def _came_s(request: BenchRequest) -> float:
    return request.arrival_s


def _users(recording: Recording, in_part: Sequence[BenchRequest]) -> Users | None:
    first = recording.outputs[recording.outputs["index"] == 0]
    came_N = np.append(first["arrival_s"] - recording.began_s, [each.arrival_s for each in in_part])
    ended_M = np.append(first["arrival_s"] + first["latency_s"], _ended_s(recording)) - recording.began_s
    return users_of(np.sort(came_N), np.sort(ended_M))


def _ended_s(recording: Recording) -> list[float]:
    """Return when requests ended that came before the first step, and are not among the outputs therefore."""
    steps, last_N = recording.steps, np.full(len(recording.spans), -1)
    for number, (first, count) in enumerate(zip(steps["first_span"].tolist(), steps["num_spans"].tolist())):
        last_N[first : first + count] = number
    last = dict[int, int]()
    for seq_id, number in zip(recording.spans["seq_id"].tolist(), last_N.tolist()):
        last[seq_id] = max(number, last.get(seq_id, -1))
    for seq_id in recording.outputs["seq_id"].tolist():
        last.pop(seq_id, None)
    numbers = [number for number in last.values() if 0 <= number < len(steps) - 1]
    return (steps["start_s"] + steps["plan_s"] + steps["run_s"])[numbers].tolist()


def _in_part(recording: Recording, max_model_len: int) -> Iterator[BenchRequest]:
    """Yield requests that take what was computed of those that were not recorded whole: others waited for them.

    Ids are in the order in which requests come, so each came behind the one before it.
    """
    steps, spans, outputs = recording.steps, recording.spans, np.sort(recording.outputs, order="seq_id")
    changes_N = np.zeros(len(spans) + 1, np.int64)
    np.add.at(changes_N, steps["first_span"], 1)
    np.add.at(changes_N, steps["first_span"] + steps["num_spans"], -1)
    num_steps_N = np.cumsum(changes_N)[:-1]  # that have each of these records
    drafted_N = spans["num_rows"] > 1
    tokens_N, rows_N = (
        num_steps_N * np.where(drafted_N, spans["num_final"], spans[name]) for name in ("num_tokens", "num_rows")
    )
    seq_ids, owners_N = np.unique(spans["seq_id"], return_inverse=True)
    num_tokens, num_rows = (np.bincount(owners_N, each).astype(int).tolist() for each in (tokens_N, rows_N))
    came_s = np.append(0.0, outputs["arrival_s"] - recording.began_s)[np.searchsorted(outputs["seq_id"], seq_ids)]
    for index in np.flatnonzero(~np.isin(seq_ids, outputs["seq_id"])).tolist():
        if num_tokens[index]:
            num_outputs = min(max(1, num_rows[index]), max_model_len - 1)
            num_prompt = max(1, num_tokens[index] - num_outputs + 1)
            num_prompt = min(num_prompt, max_model_len - num_outputs)  # more: some was computed again
            prompt = [TAIL + int(seq_ids[index])] * num_prompt
            yield BenchRequest(prompt=prompt, max_tokens=num_outputs, arrival_s=float(came_s[index]))


def _cached(recording: Recording, tokens: RecordedTokens, block_size: int) -> Iterator[Sequence[int]]:
    """Yield beginnings of prompts that were in the cache, and not from requests of the recording."""
    seen = set[int]()
    for output, request in recorded_requests(recording, tokens):
        blocks = recording.hashes_of(output)
        num_cached = int(output["num_cached"]) // block_size
        if not seen.issuperset(blocks[:num_cached]):
            yield request.prompt_ids[: num_cached * block_size + 1]
        seen.update(blocks)
