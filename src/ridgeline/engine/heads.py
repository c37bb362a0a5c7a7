"""Heads that draft from a model's hidden states: opened beside it, on the same threads, with a cache of their own.

Called by `engine/build.py`.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from ridgeline.backends.base import Backend, BackendPlan, ModelSource
from ridgeline.backends.select import select
from ridgeline.backends.step import Executable
from ridgeline.core.clock import Clock
from ridgeline.core.config import EngineConfig, SpeculationConfig
from ridgeline.core.dtypes import Array
from ridgeline.core.step import IntArray, SampledToken, Span, StepPlan, StepResult, VectorRows, Vectors, Weights
from ridgeline.decoding.drafters import Companion
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.companion import CompanionPlan, computed, plan_companion
from ridgeline.engine.executor import InlineExecutor
from ridgeline.engine.sizing import Beside, Sizing
from ridgeline.program.lower.heads import tapped
from ridgeline.program.op import Program
from ridgeline.weights.heads import HeadSource, open_eagle
from ridgeline.weights.load import StreamedWeights


def _folded(executor: InlineExecutor, hidden_TW: Vectors) -> Vectors:
    """Return what a head computes with, of the model's hidden states side by side."""
    count = len(hidden_TW)
    span, rows = Span(0, 0, (0,) * count, 0), VectorRows(0, 0, count)
    plan = StepPlan(1, (span,), (), (), (), vector_rows=(rows,), features_TW=hidden_TW)
    return computed(executor, plan).vectors[0]


def _renamed(compute: Callable[[StepPlan], StepResult], token_ids_V: IntArray, plan: StepPlan) -> StepResult:
    """Compute a step of a head; what it samples are the model's ids `token_ids_V`."""
    result = compute(plan)
    return result._replace(samples=tuple(_translated(token, token_ids_V) for token in result.samples))


def _translated(token: SampledToken, token_ids_V: IntArray) -> SampledToken:
    """Return the token by its id in the model, with what it was sampled from."""
    weights = token.weights
    if weights is not None:
        ids_N = token_ids_V[weights.token_ids_N]
        order = np.argsort(ids_N)
        weights = Weights(ids_N[order], weights.weights_N[order])
    return token._replace(token_id=int(token_ids_V[token.token_id]), weights=weights)


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A head before memory is taken: plans of its step, and of the program that folds hidden states."""

    source: HeadSource
    step: CompanionPlan
    fold: BackendPlan

    @property
    def needs(self) -> Beside:
        """Return what the model has to leave free."""
        needs = self.step.needs
        return replace(needs, taken_bytes=needs.taken_bytes + self.fold.weight_bytes)

    def open(self, target: Sizing, target_bytes_per_token: int, executable: Executable, clock: Clock) -> Companion:
        """Load the head beside the model's `executable`, with as many tokens of cache as that has.

        Raises ConfigError where nothing fits, ModelLoadError for broken weights.
        """
        step = self.step.open(target, target_bytes_per_token, executable, clock)
        nothing = replace(target.layout, groups=())
        fold = InlineExecutor(self.fold.open(self.source.fold, nothing, executable), Sampler(), nothing, clock)
        ids = self.source.token_ids_V
        compute = step.compute if ids is None else partial(_renamed, step.compute, ids)
        return replace(step, compute=compute, fold=partial(_folded, fold))


def plan_drafter(
    config: EngineConfig, target: ModelSource, offered: Sequence[Backend]
) -> tuple[CompanionPlan | HeadPlan | None, ModelSource]:
    """Return the model or the head that drafts, None where none is asked for; and `target`, with a head's taps.

    Raises as these say.
    """
    if config.speculation.drafter is None:
        return None, target
    kind, name = config.speculation.drafter
    if kind != "eagle":
        return plan_companion(name, config, target, offered), target
    head = _plan_head(name, config, target, offered)
    return head, replace(target, program=tapped(target.program, head.source.layers))


def _plan_head(name: str, config: EngineConfig, target: ModelSource, offered: Sequence[Backend]) -> HeadPlan:
    """Return the EAGLE head that drafts for `target`; it has the model's options where they concern it."""
    source = open_eagle(name, target.spec, config.model.model)
    own = replace(
        config,
        cache=replace(config.cache, prefix_caching=False),  # it begins anywhere in a text
        backend=replace(config.backend, pack_cache=False),  # packs are named by the model's files alone
        speculation=SpeculationConfig(),
        adapters={},
    )
    folder, tensors = replace(target.folder, name=source.path.name), partial(_tensors, source, target)

    def planned(program: Program) -> CompanionPlan:
        model = ModelSource(folder, target.spec, program, program, tensors=tensors)
        backend, why = select(model, own, offered)
        return CompanionPlan(own, model, backend.plan(model, own), target.spec.vocab_size, why)

    return HeadPlan(source, planned(source.step), planned(source.fold).plan)


def _tensors(source: HeadSource, target: ModelSource, dtype: np.dtype[Any]) -> Mapping[str, Array]:
    """Return the weights of a head: its own, and those of the model that it shares."""
    shared = StreamedWeights(target.folder, target.spec, target.base, dtype)
    return ChainMap(source.tensors(dtype), cast("dict[str, Array]", shared))
