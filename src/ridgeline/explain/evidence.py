"""Hold what the doctor's rules look at: a recording, its engine simulated, and what they tell together. No torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.bench.workload import BenchRequest
from ridgeline.core.config import EngineConfig
from ridgeline.engine.journal import WAIT_REASONS, Records
from ridgeline.engine.recording import EngineSetup, Recording
from ridgeline.explain.machine import SimulatedMachine

SAMPLES = 512  # steps that are priced
PAUSE_S = 0.02  # between two steps, of which a loop with something to do makes no more


class PricedStep(NamedTuple):
    """A step of the recording, with its prediction; `kv_share`: keys and values among the bytes that it moves."""

    measured_s: float
    predicted_s: float
    bound: str
    kv_share: float


@dataclass(frozen=True)
class Evidence:
    """Holds a recording and its engine as it is simulated: `config` is without drafts."""

    recording: Recording
    setup: EngineSetup
    config: EngineConfig
    machine: SimulatedMachine
    drafts: bool

    @cached_property
    def busy_s(self) -> float:
        """The time of all steps."""
        return float(self.recording.steps["run_s"].sum()) or 1e-12

    @cached_property
    def expanded(self) -> tuple[npt.NDArray[np.int64], Records]:
        """The spans of all steps one after the other, and the number of each one's step."""
        counts, firsts = (self.recording.steps[name].astype(np.int64) for name in ("num_spans", "first_span"))
        owners = np.repeat(np.arange(len(counts)), counts)
        return owners, self.recording.spans[np.arange(len(owners)) + (firsts - np.cumsum(counts) + counts)[owners]]

    @cached_property
    def priced(self) -> Sequence[PricedStep]:
        """Some of the steps."""
        found: list[PricedStep] = []
        time = self.machine.step_time
        for load, behind, measured_s in self.recording.timed(SAMPLES):
            limits, cost = time.bounds(load)
            kv = cost.kv_read_bytes / max(1.0, cost.kv_read_bytes + cost.weight_bytes)
            bound = max(limits, key=limits.__getitem__)
            found.append(PricedStep(measured_s, time.seconds(load, behind), bound, kv))
        return found

    def share_of_time(self, counter: str) -> float | None:
        """Return how much a counter of seconds of the machine grew in a second; None where it does not tell, or not
        often. What is stolen of all cores is shared among them."""
        grown, cores = self.grown(counter), (self.setup.num_cores or 1) if counter == "steal_s" else 1
        return None if grown is None else min(1.0, grown / cores / self.busy_s)

    def grown(self, counter: str) -> float | None:
        """Return how much a counter of the machine grew; None where it does not tell, or not often."""
        values = self.recording.host[counter]
        return float(values[-1] - values[0]) if len(values) > 2 and not np.isnan(values[[0, -1]]).any() else None

    def around(self, name: str) -> Records:
        """Return the records that tell something of the engine, from when its steps are."""
        around = self.recording.around
        around = around[around["time_s"] >= self.recording.steps["start_s"].min(initial=np.inf)]
        return around[~np.isnan(around[name])]

    def last_around(self, name: str) -> float | None:
        """Return the last that was told of the engine; None where nothing was."""
        told = self.recording.around[name][~np.isnan(self.recording.around[name])]
        return float(told[-1]) if len(told) else None

    def waits(self, *reasons: str) -> float:
        """Return the share of the time in which the queue's head waits for one of these."""
        steps = self.recording.steps
        codes = [WAIT_REASONS.index(reason) for reason in reasons]
        return float(steps["run_s"][np.isin(steps["head_waits"], codes)].sum() / self.busy_s)

    def repeated(self, kind: str = "hash") -> float:
        """Return the share of the prompts' tokens in whole blocks that an earlier prompt began with; `own`: had."""
        seen, repeated, total = set[int](), 0, 0
        for output, blocks in self.prompts(kind):
            repeated += self.setup.layout.block_size * sum(block in seen for block in blocks)
            total += int(output["num_prompt"])
            seen.update(blocks)
        return repeated / max(1, total)

    def prompts(self, kind: str) -> Sequence[tuple[np.void, Sequence[int]]]:
        """Return the records of the requests with the hashes of their prompts' whole blocks, in order of arrival."""
        size, outputs = self.setup.layout.block_size, self.recording.outputs
        firsts = sorted(outputs[outputs["index"] == 0], key=lambda each: float(each["arrival_s"]))
        return [(each, self.recording.hashes_of(each, kind)[: int(each["num_prompt"]) // size]) for each in firsts]

    def sorted_prompts(self, requests: Sequence[BenchRequest]) -> list[BenchRequest]:
        """Return requests, those of `prompts`, with the blocks first that most of them have."""
        size, prompts = self.setup.layout.block_size, self.prompts("own")
        counts = Counter(block for _, blocks in prompts for block in set(blocks))
        numbers = {block: number for number, block in enumerate(counts)}
        found: list[BenchRequest] = []
        for request, (output, blocks) in zip(requests, prompts):
            rest = int(output["num_prompt"]) - size * len(blocks)
            order = sorted(blocks, key=lambda block: -counts[block])
            ids = [numbers[block] * size + i for block in order for i in range(size)]
            ids += [-1 - int(output["seq_id"])] * rest
            found.append(BenchRequest(prompt=ids, max_tokens=request.max_tokens, arrival_s=request.arrival_s))
        return found

    def held_s(self) -> tuple[float, float]:
        """Return how long requests stood still behind their first token, in no step, and how long all took."""
        outputs, steps = self.recording.outputs, self.recording.steps
        outputs = outputs[(outputs["num_preemptions"] == 0) & ~np.isnan(outputs["ttft_s"])]
        taken_s = steps["plan_s"] + steps["run_s"] + steps["commit_s"] + steps["render_s"] + PAUSE_S
        lasted_s = np.minimum(taken_s, np.append(np.diff(steps["start_s"]), np.inf))
        owners, spans = self.expanded
        held_s = 0.0
        for output in outputs:
            its = owners[spans["seq_id"] == output["seq_id"]]
            first_s, end_s = (float(output["arrival_s"] + output[name]) for name in ("ttft_s", "latency_s"))
            own_s = float(lasted_s[its[steps["start_s"][its] + taken_s[its] - PAUSE_S > first_s]].sum())
            held_s += max(0.0, end_s - first_s - own_s)
        return held_s, float(outputs["latency_s"].sum())
