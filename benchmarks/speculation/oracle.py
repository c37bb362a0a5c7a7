"""Speculation with drafts of a known acceptance: the speed-up that the cost model predicts beside the one measured.

usage: python -m benchmarks.speculation.oracle --model MODEL [--acceptance 0 0.5 0.7 0.9 1] [--lengths 1 2 4 8]
       [--batches 1 4 16] [--formats bf16 int8 "int4 int8-inputs"] [--tokens 96] [--pairs 3]

Drafts replay what the model says without drafts, each token replaced with chance 1 - acceptance; what verifies them is
the engine as it serves, so any weights will do. Predicted: tokens of a round, (1 - a^(k+1)) / (1 - a), times the ratio
of two steps as the cost model has them, calibrated for each format first. A step with drafts waits for the one before:
what it takes beside the model, which overlaps where nothing is drafted, is measured in a run of its own at every batch
and length. Prompts are in neither: rates are those of the tokens behind the first ones.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.common import calibrate, option_parser, save
from benchmarks.decode_stream import FORMATS
from benchmarks.speculation.turns import Timed, Turn
from rich.console import Console
from rich.table import Table

from ridgeline import SamplingParams
from ridgeline.bench.report import Report
from ridgeline.core.config import EngineConfig
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import StepPlan
from ridgeline.cost.efficiency import Rest
from ridgeline.cost.speculation import tokens_per_round
from ridgeline.cost.steptime import StepTime
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.decoding.strategy import SequenceView
from ridgeline.engine.executor import StepTimes
from ridgeline.explain.machine import simulated_machine
from ridgeline.program.pricing import Load

PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleCell:
    """One point: the speed-up in each pair, and what was predicted for the acceptance that was drawn."""

    format: str
    batch: int
    length: int
    acceptance: float
    accepted_share: float  # of the tokens that were tried: what the draws came to
    measured: list[float]
    beside_s: float  # that a round takes beside the model
    predicted: float
    error: float  # predicted over the median measured, less 1
    provenance: str  # of the prices of steps
    held_out_error: float | None  # of the calibration: of a busy machine's it is large, and so is every error then


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleReport(Report):
    """All points of one run, and the median of their errors' sizes."""

    model: str
    tokens: int
    cells: list[OracleCell]
    median_error: float


class Oracle:
    """Knows each output by its prompt; a place of it is drafted wrong, or right, whenever it is drafted."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, ...], list[int]] = {}
        self.acceptance, self.num_tried, self.num_right = 1.0, 0, 0

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        output = self.outputs[tuple(view.request.prompt_ids)]
        known = len(view.token_ids) - len(view.request.prompt_ids)
        draft: list[int] = []
        spoilt = False
        for place in range(known, min(known + max_tokens, len(output))):
            is_right = random.Random(f"{view.request.prompt_ids[0]} {place}").random() < self.acceptance
            if not spoilt:
                self.num_tried += 1
                self.num_right += is_right
            spoilt = spoilt or not is_right
            draft.append(output[place] if is_right else output[place] ^ 1)
        return Draft(draft, 0) if draft else None

    def forget(self, view: SequenceView) -> None:
        """Forget nothing."""


class Beside:
    """Observes steps: what the drafted ones that follow each other take beside the model."""

    times_ops = False

    def __init__(self) -> None:
        self.beside_s: list[float] = []
        self._ended_s, self._drafted = 0.0, False

    def observe(self, plan: StepPlan, times: StepTimes) -> None:
        now_s, drafted = time.perf_counter(), any(span.num_optional for span in plan.spans)
        if drafted and self._drafted:
            self.beside_s.append(now_s - self._ended_s - times.run_s)
        self._ended_s, self._drafted = now_s, drafted


def beside_of(on: Timed, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
    """Return the seconds that a round of an engine with drafts takes beside the model, the median of one run."""
    executor, observer = on.engine.executor, Beside()
    executor.observer = observer
    on.run(prompts, params)
    executor.observer = None
    return statistics.median(observer.beside_s)


def decode_rate(turn: Turn) -> float:
    """Return the tokens per second behind the first ones, which the step of the prompts brings."""
    first_s = max(output.token_s[0] for output in turn.outputs)
    return sum(len(output.token_ids) - 1 for output in turn.outputs) / (turn.seconds - first_s)


def measure(options: argparse.Namespace) -> Iterator[OracleCell]:
    """Yield the points, the formats outermost: each opens its engines once."""
    most = max(options.batches)
    for name in options.formats:
        config = EngineConfig.of(
            options.model,
            num_threads=options.threads,
            max_num_seqs=most * (1 + max(options.lengths)),  # bounds the rows of logits, too
            max_model_len=PROMPT_TOKENS + options.tokens + 16,
            max_num_batched_tokens=most * (max(options.lengths) + PROMPT_TOKENS),  # all prompts are one step
            deterministic=options.deterministic,
            **FORMATS[name],
        )
        fitted = calibrate(config)
        machine = simulated_machine(config)
        # drafts of the benchmark's own, for which the cache of a recurrent model has to have room
        speculation = SpeculationConfig(speculate="prediction", num_speculative_tokens=max(options.lengths))
        off, on, oracle = Timed(config), Timed(replace(config, speculation=speculation)), Oracle()
        rng = random.Random(0)
        vocabulary = off.engine.info.vocab_size
        for batch in options.batches:
            prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
            params = [SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)] * batch
            off.run(prompts, params)
            oracle.outputs = {
                tuple(prompt): output.token_ids for prompt, output in zip(prompts, off.outputs.values(), strict=True)
            }
            on.run(prompts, params)
            for length, acceptance in product(options.lengths, options.acceptance):
                oracle.acceptance, oracle.num_tried, oracle.num_right = acceptance, 0, 0
                # the engine's own strategy, with drafts that no user could ask for
                on.engine.loop.scheduler.strategy = Speculative({"oracle": oracle}, length, None, time.monotonic)
                beside_s = beside_of(on, prompts, params)
                ratios: list[float] = []
                for pair in range(options.pairs):
                    rates = {i: decode_rate((off, on)[i].run(prompts, params)) for i in ((0, 1), (1, 0))[pair % 2]}
                    ratios.append(rates[1] / rates[0])
                assert oracle.num_tried, "nothing was drafted"
                share = oracle.num_right / oracle.num_tried
                context = PROMPT_TOKENS + options.tokens // 2
                predicted = predict(machine.step_time, batch, length, share, context, beside_s)
                yield OracleCell(
                    format=name,
                    batch=batch,
                    length=length,
                    acceptance=acceptance,
                    accepted_share=share,
                    measured=ratios,
                    beside_s=beside_s,
                    predicted=predicted,
                    error=predicted / statistics.median(ratios) - 1,
                    provenance=machine.provenance,
                    held_out_error=fitted.held_out_error,
                )


def predict(step_time: StepTime, batch: int, length: int, acceptance: float, context: int, beside_s: float) -> float:
    """Return the speed-up of drafts of `length` tokens that cost nothing, over steps of one token a sequence.

    `beside_s` is what a round takes beside the model.
    """
    plain_s = step_time.seconds(Load.decode(batch, context))
    model_alone = step_time.with_rest(Rest(0.0, 0.0, ops=step_time.rest.ops, few_ops=step_time.rest.few_ops))
    round_s = beside_s + model_alone.seconds(Load(((1 + length, context),) * batch, batch * (1 + length)))
    return tokens_per_round([acceptance] * length) * plain_s / round_s


def show(cells: Sequence[OracleCell]) -> None:
    """Print a row for each point."""
    table = Table("format", "batch", "drafted", "acceptance", "measured", "predicted", "error")
    for each in cells:
        low, high = min(each.measured), max(each.measured)
        table.add_row(
            each.format,
            str(each.batch),
            str(each.length),
            f"{each.acceptance:g} ({each.accepted_share:.2f})",
            f"{statistics.median(each.measured):.2f} ({low:.2f} to {high:.2f})",
            f"{each.predicted:.2f}",
            f"{each.error:+.0%}",
        )
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.7, 0.8, 0.9, 1.0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"], choices=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="acceptance exact in every batch; slower")
    options = parser.parse_args(arguments)
    cells = list(measure(options))
    show(cells)
    error = statistics.median(abs(each.error) for each in cells)
    print(f"median error {error:.1%}")
    name = Path(options.model).name
    report = OracleReport(
        name=f"speculation-oracle-{name}", model=name, tokens=options.tokens, cells=cells, median_error=error
    )
    save(options.out, report)


if __name__ == "__main__":
    main()
