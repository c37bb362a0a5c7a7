"""Say from which acceptance drafts pay: a round with k drafted tokens of each sequence, beside a plain step.

Priced as `ridgeline simulate` prices steps. Must not import torch.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

from ridgeline.backends.base import BackendPlan
from ridgeline.backends.select import offers
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.words import counted
from ridgeline.cost.speculation import tokens_per_round
from ridgeline.engine.companion import plan_drafter
from ridgeline.engine.model import open_model
from ridgeline.explain.exploration import frame, html_table
from ridgeline.explain.machine import THIS_MACHINE, SimulatedMachine, simulated_machine, step_time_here
from ridgeline.program.op import Program
from ridgeline.program.pricing import Load

BATCHES, DRAFTS, SCHEMES = (1, 4, 16, 32), (1, 2, 4, 8), (None, "int8", "int4")
Seconds = Callable[[int, int], float]  # of a step, by its sequences and the rows of each


@dataclass(frozen=True, slots=True)
class Round:
    """Holds a round's time in plain steps, `ratio`, and the acceptance from which it gains that: exactly, and by
    kα + 1, which counts tokens behind a rejected one too. None where it costs more than all its tokens."""

    weights: str
    batch: int
    drafts: int
    ratio: float
    acceptance: float | None
    textbook: float | None

    def speedup(self, acceptance: float) -> float:
        """Return how much faster than plain steps such rounds are."""
        return tokens_per_round((acceptance,) * self.drafts) / self.ratio


class BreakEven(NamedTuple):
    """Holds what rounds cost, and for what that holds; in a notebook it is a table."""

    sentence: str
    rounds: list[Round]

    def to_pandas(self) -> Any:
        """Return a record for each round as a pandas.DataFrame. Raises ConfigError without pandas."""
        return frame([asdict(each) for each in self.rounds])

    def _repr_html_(self) -> str:
        rows = [["never" if cell is None else str(cell) for cell in asdict(each).values()] for each in self.rounds]
        return html_table(self.sentence, [field.name for field in fields(Round)], rows)


@dataclass(frozen=True, slots=True)
class _Drafting:
    """Says what it takes to draft so many tokens for each of so many sequences; nothing where text is looked up."""

    seconds: Seconds = lambda batch, drafts: 0.0
    max_drafts: int = max(DRAFTS)


def break_even(
    config: EngineConfig | str, hardware: str = THIS_MACHINE, context: int | None = None, **options: object
) -> BreakEven:
    """Price rounds of what `config`, or a model with `options`, drafts with: one for each format, batch and k.

    Formats that the model does not take are left out. Raises ConfigError for what cannot draft or be priced,
    ModelLoadError for broken files.
    """
    config = EngineConfig.of(config, **options) if isinstance(config, str) else config
    if context is not None and context not in range(1, 1 << 30):
        raise ConfigError(f"context must be a number of tokens, got {context}")
    if not config.speculation.proposers():
        raise ConfigError("speculate=off drafts nothing; name what drafts, such as ngram or draft:MODEL")
    rounds: list[Round] = []
    says = ""
    for scheme in SCHEMES:
        asked = replace(config, quantize=replace(config.quantize, scheme=scheme))
        try:
            machine = simulated_machine(replace(asked, speculation=SpeculationConfig()), hardware)
        except ConfigError:
            if not rounds:
                raise
            continue
        length = min(context or 1024, machine.max_positions - max(DRAFTS))
        rounds += _rounds(scheme or "as stored", machine, length, _drafting(asked, hardware, length))
        says = (
            says or f"{machine.model} on {machine.name}, {counted(length, 'token')} a sequence [{machine.provenance}]"
        )
    return BreakEven(says, rounds)


def _rounds(weights: str, machine: SimulatedMachine, context: int, drafting: _Drafting) -> Iterator[Round]:
    seconds = machine.step_time.seconds
    for batch, drafts in product(BATCHES, [drafts for drafts in DRAFTS if drafts <= drafting.max_drafts]):
        round_s = seconds(Load(((drafts + 1, context + drafts),) * batch, batch * (drafts + 1)))
        round_s += drafting.seconds(batch, drafts)
        ratio = round_s / seconds(Load.decode(batch, context))
        if ratio > drafts + 1:
            yield Round(weights, batch, drafts, ratio, None, None)
            continue
        enough = bisect_left(range(1000), ratio, key=lambda share: tokens_per_round((share / 1000,) * drafts))
        yield Round(weights, batch, drafts, ratio, enough / 1000, max((ratio - 1) / drafts, 0.0))


def _drafting(config: EngineConfig, hardware: str, context: int) -> _Drafting:
    """Price a step of the draft model or the EAGLE head a token, or of Medusa heads and parallel drafts at once."""
    if config.speculation.drafter is None:
        return _Drafting()
    if hardware != THIS_MACHINE:
        raise ConfigError(f"speculate={config.speculation.speculate} is priced on this machine alone, not {hardware}")
    companion, _ = plan_drafter(config, open_model(config), offers(config.backend.backend))
    assert companion is not None, "a drafter was asked for"

    def seconds(program: Program, plan: BackendPlan) -> Seconds:
        time = step_time_here(companion.config, program, plan)
        return lambda batch, rows: time.seconds(Load(((rows, context + rows - 1),) * batch, batch * rows))

    step = seconds(companion.model.program, companion.plan)
    source, fold = companion.source, companion.fold
    if companion.mask_id is not None:
        return _Drafting(step)
    if source is None:
        return _Drafting(lambda batch, drafts: drafts * step(batch, 1))
    if source.fold is None or fold is None:
        return _Drafting(lambda batch, drafts: step(batch, 1), source.num_heads)
    folded = seconds(source.fold, fold)
    return _Drafting(lambda batch, drafts: folded(batch, 1) + drafts * step(batch, 1))
