"""An engine that completes a batch and says when each token came, and which tokens are in loops."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline import SamplingParams
from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.step import DraftStats
from ridgeline.engine.build import build_engine
from ridgeline.engine.engine import Engine
from ridgeline.engine.outputs import OutputDelta

LOOP_TOKENS = 16
SLICE_S = 0.05  # of an engine's time, between those of another: what slows the machine for longer slows both


@dataclass(slots=True)
class Output:
    """Tokens of one output, and how long each took: its share of the time since the step before."""

    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    num_before: int = 0  # tokens that came before the time that counts

    def outside_loops(self) -> tuple[int, float]:
        """Return how many tokens are outside loops, and their seconds."""
        timed = list(zip(self.token_s, in_loops(self.token_ids), strict=True))[self.num_before :]
        times = [seconds for seconds, loops in timed if not loops]
        return len(times), sum(times)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one engine made of one batch."""

    seconds: float
    outputs: list[Output]

    @property
    def rate(self) -> float:
        return sum(len(output.token_ids) - output.num_before for output in self.outputs) / self.seconds

    @property
    def rate_outside_loops(self) -> float | None:
        counts = [output.outside_loops() for output in self.outputs]
        num_tokens, seconds = sum(count for count, _ in counts), sum(seconds for _, seconds in counts)
        return num_tokens / seconds if num_tokens else None


class Timed:
    """An engine whose tokens are timed as they are delivered, by the clock that it decides by.

    With `decoding_alone` time begins when each output has its first token.
    """

    def __init__(self, config: EngineConfig, clock: Clock = time.perf_counter, *, decoding_alone: bool = False) -> None:
        self._decoding_alone = decoding_alone
        self._waits_for_first = False
        self.outputs: dict[str, Output] = {}
        self._unfinished = 0
        self._last_s: dict[str, float] = {}
        self._clock = clock
        self._began_s = self._away_s = 0.0
        self._left_s: float | None = None  # since when others have a turn: until it is over the clock stands still
        self.engine: Engine = build_engine(config, self._deliver, self._now)

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Turn:
        """Complete all prompts at once."""
        return in_slices([self], prompts, params, math.inf)[0]

    def begin(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        """Take in all prompts, and wait."""
        engine = self.engine
        requests = [engine.intake.request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        self.outputs = {request.request_id: Output() for request in requests}
        self._unfinished = len(requests)
        self._began_s, self._waits_for_first = self._now(), self._decoding_alone
        self._last_s = dict.fromkeys(self.outputs, self._began_s)
        for request in requests:
            engine.loop.submit(request)
        self._left_s = self._clock()

    def go_on(self, seconds: float) -> Turn | None:
        """Decode for so long, and wait again; return what came of all prompts once they are complete."""
        if self._left_s is not None:
            self._away_s, self._left_s = self._away_s + self._clock() - self._left_s, None
        end_s = self._now() + seconds
        while self._unfinished and self._now() < end_s:
            self.engine.loop.step()
        turn = None if self._unfinished else Turn(self._now() - self._began_s, list(self.outputs.values()))
        self._left_s = self._clock() if self._unfinished else None
        return turn

    def drafts(self) -> dict[str, DraftStats]:
        """Return what became of drafts since the start, by proposer."""
        return dict(self.engine.loop.stats().drafts or {})

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        now_s = self._now()
        for delta in deltas:
            output = self.outputs[delta.request_id]
            if count := len(delta.token_ids):
                output.token_ids += delta.token_ids
                output.token_s += [(now_s - self._last_s[delta.request_id]) / count] * count
                self._last_s[delta.request_id] = now_s
            if delta.finish is not None:
                assert delta.finish.error is None, delta.finish.error
                self._unfinished -= 1
        if self._waits_for_first and all(output.token_ids for output in self.outputs.values()):
            self._began_s, self._waits_for_first = now_s, False
            for output in self.outputs.values():
                output.num_before = len(output.token_ids)

    def _now(self) -> float:
        return (self._clock() if self._left_s is None else self._left_s) - self._away_s


def in_slices(
    engines: Sequence[Timed],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    slice_s: float = SLICE_S,
) -> list[Turn]:
    """Return what each engine made of all prompts at once, in turns of so many seconds."""
    for engine in engines:
        engine.begin(prompts, params)
    turns: dict[int, Turn] = {}
    while len(turns) < len(engines):
        for index, engine in enumerate(engines):
            if index not in turns and (turn := engine.go_on(slice_s)) is not None:
                turns[index] = turn
    return [turns[index] for index in range(len(engines))]


def in_loops(token_ids: Sequence[int]) -> list[bool]:
    """Tell of each token whether it is in a loop, from its second cycle on."""
    inside = [False] * len(token_ids)
    for period in range(1, len(token_ids) // 2 + 1):
        run = 0
        for i in range(period, len(token_ids) + 1):
            if i < len(token_ids) and token_ids[i] == token_ids[i - period]:
                run += 1
                continue
            if run >= max(LOOP_TOKENS, period):
                inside[i - run : i] = [True] * run
            run = 0
    return inside
