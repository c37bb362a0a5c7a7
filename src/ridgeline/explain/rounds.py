"""Say from which acceptance drafts pay: a round with k drafted tokens of each sequence, beside a plain step.

Priced as `ridgeline simulate` prices steps. Must not import torch.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, product
from typing import Any, NamedTuple

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.words import counted
from ridgeline.cost.speculation import tokens_per_round
from ridgeline.engine.companion import with_own_head
from ridgeline.explain.drafting import Drafting, draftings
from ridgeline.explain.exploration import frame, html_table
from ridgeline.explain.machine import THIS_MACHINE, SimulatedMachine, simulated_machine
from ridgeline.program.pricing import Load
from ridgeline.weights.folder import ModelFolder

BATCHES, DRAFTS, SCHEMES = (1, 4, 16, 32), (1, 2, 4, 8), (None, "int8", "int4")


@dataclass(frozen=True, slots=True)
class Round:
    """Holds a round's time in plain steps, `ratio`, and the acceptance from which it gains that: exactly, and by
    kα + 1, which counts tokens behind a rejected one too. None where it costs more than all its tokens. `proposers`
    draft in it: all that look text up, at no price, or the one that computes a model."""

    proposers: str
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


def break_even(
    config: EngineConfig | str, hardware: str = THIS_MACHINE, context: int | None = None, **options: object
) -> BreakEven:
    """Price rounds of what `config`, or a model with `options`, drafts with: one for each format, batch and k.

    What looks text up and what computes a model, as a head that `auto` finds, have rounds of their own.

    Formats that the model does not take are left out. Raises ConfigError for what cannot draft or be priced,
    ModelLoadError for broken files.
    """
    config = EngineConfig.of(config, **options) if isinstance(config, str) else config
    if context is not None and context not in range(1, 1 << 30):
        raise ConfigError(f"context must be a number of tokens, got {context}")
    if not config.speculation.proposers():
        raise ConfigError("speculate=off drafts nothing; name what drafts, such as ngram or draft:MODEL")
    if hardware == THIS_MACHINE and config.speculation.is_auto:
        config = with_own_head(config, ModelFolder.open(config.model.model, config.model.revision))
    rounds: dict[str, list[Round]] = {}
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
        for proposers, drafting in draftings(asked, hardware, length):
            found = _rounds(proposers, scheme or "as stored", machine, length, drafting)
            rounds.setdefault(proposers, []).extend(found)
        says = (
            says or f"{machine.model} on {machine.name}, {counted(length, 'token')} a sequence [{machine.provenance}]"
        )
    return BreakEven(says, list(chain.from_iterable(rounds.values())))


def _rounds(
    proposers: str, weights: str, machine: SimulatedMachine, context: int, drafting: Drafting
) -> Iterator[Round]:
    seconds = machine.step_time.seconds
    for batch, drafts in product(BATCHES, [drafts for drafts in DRAFTS if drafts <= drafting.max_drafts]):
        round_s = seconds(Load(((drafts + 1, context + drafts),) * batch, batch * (drafts + 1)))
        round_s += drafting.seconds(batch, drafts)
        ratio = round_s / seconds(Load.decode(batch, context))
        if ratio > drafts + 1:
            yield Round(proposers, weights, batch, drafts, ratio, None, None)
            continue
        enough = bisect_left(range(1000), ratio, key=lambda share: tokens_per_round((share / 1000,) * drafts))
        yield Round(proposers, weights, batch, drafts, ratio, enough / 1000, max((ratio - 1) / drafts, 0.0))
