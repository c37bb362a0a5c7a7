"""What is asked of every engine: the cells of the comparison, and how a cell's value follows from durations.

Prompts are random token ids that depend on the seed, the repetition and the cell alone, so all engines get the same.
"""

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.peers.report import CellFacts

PREFILL_ROUNDS = 3
WARM_UP_INPUT_TOKENS = 64
SHORT_CONTEXT_TOKENS = 64  # a decode cell says its context where it is longer

Ask = Callable[[list[list[int]], int], float]
"""(prompts, output tokens of each) -> seconds until all have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure. Every request has `shared_tokens` in common with the others, then `input_tokens` of its own."""

    name: str
    kind: Literal["start", "prefill", "decode", "serve", "prefix"]
    requests: int = 1
    shared_tokens: int = 0
    input_tokens: int
    output_tokens: int = 1

    @property
    def unit(self) -> str:
        return {"start": "s", "prefill": "input tokens/s"}.get(self.kind, "output tokens/s")

    @property
    def lower_is_better(self) -> bool:
        return self.kind == "start"

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, warm-ups included."""
        return max(self.shared_tokens + self.input_tokens + self.output_tokens, WARM_UP_INPUT_TOKENS) + 2

    @property
    def label(self) -> str:
        """For tables and figures."""
        match self.kind:
            case "start":
                return "process start to first token"
            case "prefill":
                return f"prefill, {self.input_tokens:,} tokens"
            case "decode" if self.input_tokens > SHORT_CONTEXT_TOKENS:
                return f"decode, batch {self.requests}, {self.input_tokens:,} tokens of context"
            case "decode":
                return f"decode, batch {self.requests}"
            case "serve":
                return f"{self.requests} × ({self.input_tokens:,} in, {self.output_tokens:,} out)"
            case "prefix":
                return f"{self.requests} × {self.shared_tokens:,}-token shared prefix"

    def facts(self) -> CellFacts:
        """For the result."""
        return CellFacts(
            name=self.name,
            label=self.label,
            unit=self.unit,
            lower_is_better=self.lower_is_better,
            requests=self.requests,
            shared_tokens=self.shared_tokens,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
        )

    def shrunk(self, factor: int) -> "Cell":
        """The same with about 1/factor of the tokens, to see that an engine works; decoding stays as long as it is."""

        def fewer(tokens: int) -> int:
            return min(tokens, max(tokens // factor, 4))

        return dataclasses.replace(
            self,
            shared_tokens=fewer(self.shared_tokens),
            input_tokens=fewer(self.input_tokens),
            output_tokens=self.output_tokens if self.kind == "decode" else fewer(self.output_tokens),
        )


START = Cell(name="start", kind="start", input_tokens=16)  # what every process does first
CELLS = (
    START,
    Cell(name="prefill_512", kind="prefill", input_tokens=512),
    Cell(name="decode_b1", kind="decode", requests=1, input_tokens=16, output_tokens=64),
    Cell(name="decode_b4", kind="decode", requests=4, input_tokens=16, output_tokens=32),
    Cell(name="decode_b16", kind="decode", requests=16, input_tokens=16, output_tokens=32),
    Cell(name="serve_16", kind="serve", requests=16, input_tokens=256, output_tokens=64),
    Cell(name="prefix_1024", kind="prefix", requests=16, shared_tokens=1024, input_tokens=32, output_tokens=16),
    Cell(name="decode_8k", kind="decode", requests=1, input_tokens=8192, output_tokens=32),
)


class PromptSource:
    """Random prompts of one cell in one repetition: no two draws share a prefix, unless one is given."""

    def __init__(self, seed: int, repetition: int, cell: Cell, vocab_size: int) -> None:
        self._rng = random.Random(f"{seed} {repetition} {cell.name}")
        self._vocab_size = vocab_size

    def draw(self, count: int, num_tokens: int, prefix: Sequence[int] = ()) -> list[list[int]]:
        """`count` prompts of the prefix and `num_tokens` more."""
        return [[*prefix, *(self._rng.randrange(self._vocab_size) for _ in range(num_tokens))] for _ in range(count)]


def measure(cell: Cell, ask: Ask, prompts: PromptSource) -> float:
    """The cell's value in its unit, after a warm-up with as many requests. A start is timed by who starts."""
    match cell.kind:
        case "start":
            raise AssertionError("the start is over once there is something to ask")
        case "prefill":
            ask(prompts.draw(1, cell.input_tokens), 1)
            durations_s = [ask(prompts.draw(1, cell.input_tokens), 1) for _ in range(PREFILL_ROUNDS)]
            return cell.input_tokens / statistics.median(durations_s)
        case "decode":
            return _decode_rate(cell, ask, prompts.draw(cell.requests, cell.input_tokens))
        case "serve":
            ask(prompts.draw(cell.requests, WARM_UP_INPUT_TOKENS), 2)
            duration_s = ask(prompts.draw(cell.requests, cell.input_tokens), cell.output_tokens)
            return cell.requests * cell.output_tokens / duration_s
        case "prefix":
            ask(prompts.draw(cell.requests, WARM_UP_INPUT_TOKENS), 2)
            (prefix,) = prompts.draw(1, cell.shared_tokens)
            ask(prompts.draw(1, cell.input_tokens, prefix), 2)  # leaves the prefix in the cache, where there is one
            duration_s = ask(prompts.draw(cell.requests, cell.input_tokens, prefix), cell.output_tokens)
            return cell.requests * cell.output_tokens / duration_s


def _decode_rate(cell: Cell, ask: Ask, prompts: list[list[int]]) -> float:
    """Tokens after the first, by the difference of a long and a short output to the same prompts.

    Both find in the prefix cache what the warm-up left there, so the prefill cancels out with a cache and without.
    """
    ask(prompts, 2)
    short_s = statistics.median(ask(prompts, 1) for _ in range(PREFILL_ROUNDS))
    long_s = ask(prompts, 1 + cell.output_tokens)
    if long_s <= short_s:
        raise RuntimeError(
            f"{cell.name}: {1 + cell.output_tokens} tokens took no longer than one, nothing to divide by"
        )
    return cell.requests * cell.output_tokens / (long_s - short_s)
