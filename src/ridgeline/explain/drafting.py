"""Price what drafts, and let what it drafts be right as often as is said. Must not import torch."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.backends.base import BackendPlan
from ridgeline.backends.select import offers
from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.step import StepPlan
from ridgeline.decoding.draft_control import DraftControl
from ridgeline.decoding.proposers import Draft
from ridgeline.decoding.strategies.speculative import Speculative
from ridgeline.decoding.strategy import SequenceView
from ridgeline.engine.companion import plan_drafter
from ridgeline.engine.model import open_model
from ridgeline.engine.sizing import Beside
from ridgeline.explain.machine import THIS_MACHINE, SimulatedMachine, step_time_here
from ridgeline.program.op import Program, RecurrentState
from ridgeline.program.pricing import Load

Seconds = Callable[[int, int], float]  # of a step, by its sequences and the rows of each
DRAFT_CONTEXT = 512  # tokens of a sequence, for which steps of what drafts are priced
RIGHT, WRONG = 0, 1  # tokens of a simulation, whose outputs are all RIGHT


@dataclass(frozen=True, slots=True)
class Drafting:
    """Says what it takes to draft so many tokens for each of so many sequences; nothing where text is looked up."""

    seconds: Seconds = lambda batch, drafts: 0.0
    max_drafts: int = 1 << 30  # as many as are asked for
    beside: Beside | None = None  # what has to be free for it


def draftings(config: EngineConfig, hardware: str, context: int) -> Iterator[tuple[str, Drafting]]:
    """Price what looks text up, if anything does, and what computes a model, if that does; with their names.

    Raises ConfigError for a model elsewhere than on this machine, and as `plan_drafter`.
    """
    drafter = config.speculation.drafter
    computes = () if drafter is None else (drafter[0],)
    if lookups := [name for name in config.speculation.proposers() if name not in computes]:
        yield ", ".join(lookups), Drafting()
    if drafter is not None:
        yield drafter[0], _computing(config, hardware, context)


def _computing(config: EngineConfig, hardware: str, context: int) -> Drafting:
    """Price a step of the draft model or the EAGLE head a token, or of Medusa heads and parallel drafts at once."""
    if hardware != THIS_MACHINE:
        raise ConfigError(f"speculate={config.speculation.speculate} is priced on this machine alone, not {hardware}")
    companion, _ = plan_drafter(config, open_model(config), offers(config.backend.backend))
    assert companion is not None, "a drafter was asked for"

    def seconds(program: Program, plan: BackendPlan) -> Seconds:
        time = step_time_here(companion.config, program, plan)
        return lambda batch, rows: time.seconds(Load(((rows, context + rows - 1),) * batch, batch * rows))

    step = seconds(companion.model.program, companion.plan)
    source, fold, beside = companion.source, companion.fold, companion.needs
    if companion.mask_id is not None:
        return Drafting(step, beside=beside)
    if source is None:
        return Drafting(lambda batch, drafts: drafts * step(batch, 1), beside=beside)
    if source.fold is None or fold is None:
        return Drafting(lambda batch, drafts: step(batch, 1), source.num_heads, beside)
    folded = seconds(source.fold, fold)
    return Drafting(lambda batch, drafts: folded(batch, 1) + drafts * step(batch, 1), beside=beside)


class AssumedDrafts:
    """Proposes tokens that are right with a given chance: the i-th of a draft, behind right ones, with the i-th of
    `acceptance`, those behind with the last of these. A place of an output is right, or wrong, whenever it is drafted,
    if the chance is the same."""

    def __init__(self, acceptance: Sequence[float]) -> None:
        self._acceptance = acceptance
        self._draws: dict[int, tuple[random.Random, list[float]]] = {}  # by sequence, one for each place

    def propose(self, view: SequenceView, max_tokens: int) -> Draft | None:
        source, draws = self._draws.setdefault(view.seq_id, (random.Random(view.seq_id), []))
        known = len(view.token_ids) - len(view.request.prompt_ids)
        while len(draws) < known + max_tokens:
            draws.append(source.random())
        chances = (*self._acceptance, *(self._acceptance[-1],) * max_tokens)
        drafted = zip(draws[known : known + max_tokens], chances)
        return Draft([RIGHT if draw < chance else WRONG for draw, chance in drafted], 0)

    def forget(self, view: SequenceView) -> None:
        self._draws.pop(view.seq_id, None)


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """Drafts for a simulation: as `config` has them made, verified and chosen, at a price, each right by chance."""

    config: SpeculationConfig
    acceptance: tuple[float, ...]
    price: Drafting
    logged: bool  # as the states of recurrent layers have to be

    def strategy(self, clock: Clock) -> Speculative:
        """Return what decodes, and learns on `clock` how many tokens pay."""
        given = self.config
        most = min(given.max_draft_tokens(logged=self.logged), self.price.max_drafts)
        control = DraftControl() if given.adaptive_speculation else None
        return Speculative({"assumed": AssumedDrafts(self.acceptance)}, most, control, clock)

    def seconds(self, plan: StepPlan) -> float:
        """Return what it took to draft what a plan verifies."""
        drafts = [span.num_optional for span in plan.spans if span.num_optional]
        return self.price.seconds(len(drafts), max(drafts)) if drafts else 0.0


def simulated_drafts(
    config: EngineConfig, machine: SimulatedMachine, hardware: str, acceptance: tuple[float, ...]
) -> SimulatedDrafts | None:
    """Return what `config` drafts with on a machine, None for nothing.

    Raises ConfigError where drafts and `acceptance` do not go together, and for what `draftings` cannot price.
    """
    asked = config.speculation
    if not asked.proposers():
        if acceptance:
            raise ConfigError("acceptance is that of drafts, and nothing drafts: speculate=ngram, or draft:MODEL")
        return None
    if not acceptance:
        raise ConfigError(f"speculate={asked.speculate}: say how many drafted tokens are right, as acceptance=0.7")
    *_, (_, price) = draftings(config, hardware, min(DRAFT_CONTEXT, machine.max_positions))
    return SimulatedDrafts(asked, acceptance, price, any(isinstance(s, RecurrentState) for s in machine.program.states))


def parse_acceptance(text: str) -> tuple[float, ...]:
    """Return the chances of `0.7`, or by position of `0.8,0.7,0.6`; none of "". Raises ConfigError."""
    try:
        chances = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        chances = (-1.0,)
    if any(not 0 <= chance <= 1 for chance in chances):
        raise ConfigError(f"acceptance must be shares from 0 to 1, as 0.7 or by position 0.8,0.7,0.6, got {text}")
    return chances
