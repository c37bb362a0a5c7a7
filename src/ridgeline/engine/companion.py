"""Opens what drafts beside the target: a model, or a head over its hidden states, with weights and a cache of its own.

Called by `engine/build.py`. The memory for keys and values is divided so that both caches hold the same tokens.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from ridgeline.backends.base import Backend, BackendPlan, ModelSource
from ridgeline.backends.select import select
from ridgeline.backends.step import ChainEnds, Chaining, Executable, Rounding, Telling
from ridgeline.cache.manager import CacheManager
from ridgeline.core.clock import Clock
from ridgeline.core.config import Choice, EngineConfig, QuantizeConfig
from ridgeline.core.dtypes import Array
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.core.speculation import OWN_DRAFTER, OWN_HEADS, SpeculationConfig
from ridgeline.core.step import IntArray, SampledToken, Span, StepPlan, StepResult, VectorRows, Vectors
from ridgeline.decoding.drafters import Companion, translated
from ridgeline.decoding.drafters.eagle import MAX_HIDDEN
from ridgeline.decoding.model_drafts import MAX_UNSEEN
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.executor import InlineExecutor
from ridgeline.engine.model import embeds, open_model
from ridgeline.engine.sizing import Beside, Sizing, bytes_per_token, choose_sizes, step_limits
from ridgeline.program.lower import lower
from ridgeline.program.lower.heads import tapped
from ridgeline.program.op import FEATURES, Program, RecurrentState
from ridgeline.program.passes.context import for_context
from ridgeline.spec.reader import ConfigReader
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.heads import HeadSource, open_eagle, open_predictor
from ridgeline.weights.load import StreamedWeights
from ridgeline.weights.medusa import open_medusa

EARLY_EXIT, PARALLEL = "early-exit", "parallel"
MASKS = ("pard_token", "ptd_token_id")  # keys of config.json: the token that stands for one that is not known
HEADS = {"eagle": open_eagle, "medusa": open_medusa}
MAX_OWN_TOKENS = 128  # of either vocabulary at its end, which padding and additions explain


@dataclass(frozen=True, slots=True)
class CompanionPlan:
    """A draft model, or the step of a head, before memory is taken; `config` is the target's, with it for the model."""

    config: EngineConfig
    model: ModelSource
    plan: BackendPlan
    vocab_size: int
    why_backend: Choice
    source: HeadSource | None = None  # a head's files
    fold: BackendPlan | None = None  # the program that folds hidden states for a head, if that is not its step
    branches: bool = True  # whether the target verifies trees
    mask_id: int | None = None  # of a model that drafts all its tokens at once

    @property
    def needs(self) -> Beside:
        """Return what the target has to leave free."""
        context = self.config.model.max_model_len or self.model.spec.max_positions
        workspace_bytes = self.plan.workspace_bytes(step_limits(self.config, context, all_rows=False))
        taken_bytes = self.plan.weight_bytes + workspace_bytes + (self.fold.weight_bytes if self.fold else 0)
        if self.source is not None:
            _, width = (self.source.fold or self.source.step).shapes[FEATURES]
            stored = MAX_HIDDEN + MAX_UNSEEN + 2 * self.config.scheduler.max_num_batched_tokens
            taken_bytes += stored * int(width) * np.dtype(np.float32).itemsize
        return Beside(taken_bytes, bytes_per_token(self.plan, self.model.program.states))

    def open(self, target: Sizing, target_bytes_per_token: int, executable: Executable, clock: Clock) -> Companion:
        """Load the model beside the target's `executable`, with a cache of as many tokens as the target's.

        Raises ConfigError where nothing fits, ModelLoadError for broken weights.
        """
        states, declared = self.model.program.states, self.model.spec.max_positions
        length = min(target.max_model_len, declared)
        own_bytes = target.layout.total_bytes * self.needs.bytes_per_token // max(target_bytes_per_token, 1)
        cache = replace(self.config.cache, kv_cache_bytes=max(own_bytes, 1))
        config = replace(self.config, cache=cache)
        nothing = replace(target.layout, groups=())
        sizing = replace(target, layout=nothing)
        if states:
            sizing = choose_sizes(self.plan, config, states, length, all_rows=False)
        caches = CacheManager(sizing.layout, prefix_caching=config.cache.prefix_caching)
        drafter = self.plan.open(for_context(self.model.program, sizing.max_model_len), sizing.layout, executable)
        executor = InlineExecutor(drafter, Sampler(), sizing.layout, clock)
        compute, fold, source = executor.compute, None, self.source
        ends, chain = ChainEnds(self.vocab_size, source.token_ids_V if source else None), executor.chain
        if source is not None:
            if source.fold is not None and self.fold is not None:
                opened = self.fold.open(source.fold, nothing, executable)
                executor = InlineExecutor(opened, Sampler(), nothing, clock)
                ends = ends._replace(fold=opened if isinstance(opened, Chaining) else None)
            fold = partial(_folded, executor)
            if source.token_ids_V is not None:
                compute = partial(_renamed, compute, source.token_ids_V)
        of_head = (source.num_heads, source.token_ids_V) if source else (0, None)
        drafts = drafter if self.mask_id is None and not of_head[0] else None
        goes_on = drafts is not None and isinstance(executable, Rounding) and executable.goes_on_with(drafts, ends)
        context, per_step = sizing.max_model_len, config.scheduler.max_num_batched_tokens
        choices = self._choices(target, sizing)
        listen = executable.tell_taps if isinstance(executable, Telling) else None
        rest = (self.branches, partial(chain, ends), self.mask_id, goes_on, listen)
        return Companion(caches, self.vocab_size, context, per_step, choices, compute, fold, *of_head, *rest)

    def _choices(self, target: Sizing, own: Sizing) -> Mapping[str, Choice]:
        length = own.max_model_len
        why_length = "that of the model" if length == target.max_model_len else "no drafts for what is longer"
        return {
            "draft_model": Choice(self.model.folder.name, f"as asked; {self.plan.weight_bytes:,} bytes of weights"),
            "draft_backend": self.why_backend,
            "draft_max_model_len": Choice(str(length), why_length),
            **({} if self.branches else {"draft_trees": Choice("off", "a recurrent state goes on in one way alone")}),
            "draft_kv_cache_bytes": Choice(f"{own.layout.total_bytes:,}", "as many tokens as the model's own cache"),
        }


def plan_drafter(
    config: EngineConfig, target: ModelSource, offered: Sequence[Backend]
) -> tuple[CompanionPlan | None, ModelSource]:
    """Return the model or the head that drafts, if asked for, and `target`, with a head's taps; raises as these do."""
    if config.speculation.drafter is None:
        return None, target
    kind, name = config.speculation.drafter
    states = target.program.states
    if states and all(isinstance(state, RecurrentState) for state in states):
        why = "the cache is divided by its tokens' bytes, and its layers are all recurrent"
        fix = "use proposers without a model, such as speculate=auto"
        raise ConfigError(f"{target.folder.name} cannot verify drafts of {config.speculation.speculate}: {why}; {fix}")
    if kind == EARLY_EXIT:
        return _plan_first_layers(name, config, target, offered), target
    if kind not in (*HEADS, OWN_DRAFTER):
        return _plan_model(kind, name, config, target, offered), target
    spec = replace(target.spec, max_positions=target.program.context_length)  # a head goes as far as the model
    if kind == OWN_DRAFTER:
        source = open_predictor(target.folder, spec, target.base)
    else:
        source = HEADS[kind](name or _own_head(kind, target.folder), spec, config.model.model)
    tapping = replace(target, program=tapped(target.program, source.layers))
    branches = not any(isinstance(state, RecurrentState) for state in states)
    return replace(_plan_head(source, config, replace(target, spec=spec), offered), branches=branches), tapping


def with_own_head(config: EngineConfig, model: ModelFolder) -> EngineConfig:
    """Return the options, where `auto` drafts with the head that came with a model, if one did and no model drafts."""
    asked = config.speculation
    kind = next((kind for kind in OWN_HEADS if _own_heads(kind, model)), None)
    if kind is None or not asked.is_auto or asked.drafter is not None:
        return config
    return replace(config, speculation=replace(asked, speculate=f"{asked.speculate},{kind}"))


def _own_heads(kind: str, model: ModelFolder) -> list[str]:
    """Return the folders of heads that came with a model, the preferred one first."""
    folders = () if model.gguf is not None else tuple(model.path / name for name in OWN_HEADS[kind])
    return [str(folder) for folder in folders if folder.is_dir()]


def _own_head(kind: str, model: ModelFolder) -> str:
    """Return the folder of the head that came with a model. Raises ConfigError where none did."""
    if found := _own_heads(kind, model):
        return found[0]
    where = f"{' or '.join(OWN_HEADS[kind])} within its folder"
    raise ConfigError(f"{model.name} came without a head ({where}); write speculate={kind}:HEAD, or train one")


def _plan_model(
    kind: str, name: str, config: EngineConfig, target: ModelSource, offered: Sequence[Backend]
) -> CompanionPlan:
    """Return the model that drafts for `target`, with its options where they concern it, quantization included.

    Raises ConfigError for one that cannot draft for the target, ModelLoadError for broken files.
    """
    asked = replace(config.model, model=name, revision=None, task="generate", max_model_len=None)
    speculation = config.speculation if kind == PARALLEL else SpeculationConfig()  # as many rows as tokens drafted
    own = replace(config, model=asked, speculation=speculation, adapters={}, max_loras=0)
    try:
        model = open_model(own)
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(f"{name} cannot draft: {error}") from error
    own = replace(own, quantize=_quantize(config, model.folder))
    if model.spec.diffusion is not None or embeds(asked, model.spec):
        raise ConfigError(f"{name} cannot draft: it does not continue text token by token")
    _check_states(name, model.program)
    _check_vocabulary(name, model, config.model.model, target)
    backend, why_backend = select(model, own, offered)
    vocab_size = min(model.spec.vocab_size, target.spec.vocab_size)
    mask_id = _mask_of(name, model) if kind == PARALLEL else None
    return CompanionPlan(own, model, backend.plan(model, own), vocab_size, why_backend, mask_id=mask_id)


def _plan_first_layers(
    count: str, config: EngineConfig, target: ModelSource, offered: Sequence[Backend]
) -> CompanionPlan:
    """Return the first layers of `target` as a draft model, whose weights are there a second time.

    Raises ConfigError where that is no number of layers, or they have recurrent states.
    """
    spec, number = target.spec, int(count) if count.isdecimal() else 0
    if not 0 < number < len(spec.layers):
        fix = f"name how many of the {len(spec.layers)} layers draft, fewer than all"
        raise ConfigError(f"speculate={EARLY_EXIT}:{count}: {fix}")
    spec = replace(spec, layers=spec.layers[:number], predictor=None, max_positions=target.program.context_length)
    program, name = lower(spec), f"layers 1 to {number} of {target.folder.name}"
    _check_states(name, program)
    backend = replace(config.backend, pack_cache=False)  # packs are named by the model's files alone
    parts = {"backend": backend, "speculation": SpeculationConfig(), "quantize": _quantize(config)}
    own = replace(config, **parts, adapters={})
    tensors = partial(StreamedWeights, target.folder, target.spec, target.base)
    model = ModelSource(replace(target.folder, name=name), spec, program, program, tensors=tensors)
    chosen, why = select(model, own, offered)
    return CompanionPlan(own, model, chosen.plan(model, own), spec.vocab_size, why)


def _plan_head(
    source: HeadSource, config: EngineConfig, target: ModelSource, offered: Sequence[Backend]
) -> CompanionPlan:
    """Return the head, or the heads, that draft for `target`, with the model's options where they concern them."""
    backend = replace(config.backend, pack_cache=False)  # packs are named by the model's files alone
    scheduler = config.scheduler
    if not source.fold:  # Medusa heads compute a row of each sequence
        scheduler = replace(scheduler, max_num_batched_tokens=scheduler.max_num_seqs)
    parts = {"backend": backend, "scheduler": scheduler, "speculation": SpeculationConfig()}
    own = replace(config, **parts, quantize=_quantize(config), adapters={}, max_loras=0)
    folder, tensors = replace(target.folder, name=source.path.name), partial(_tensors, source, target)

    def planned(program: Program) -> CompanionPlan:
        model = ModelSource(folder, target.spec, program, program, tensors=tensors)
        backend, why = select(model, own, offered)
        return CompanionPlan(own, model, backend.plan(model, own), target.spec.vocab_size, why)

    return replace(planned(source.step), source=source, fold=planned(source.fold).plan if source.fold else None)


def _quantize(config: EngineConfig, folder: ModelFolder | None = None) -> QuantizeConfig:
    """Return how what drafts is quantized; a folder of its own may have it in few bits already."""
    asked, own = config.speculation.draft_quantize, config.quantize
    stored = folder is not None and (folder.gguf is not None or "quantization_config" in folder.config)
    if asked == "auto" and (own.scheme is not None or stored):
        return own
    return QuantizeConfig(scheme={"auto": "int8", "none": None}.get(asked, asked), inputs=own.inputs)


def _folded(executor: InlineExecutor, hidden_TW: Vectors) -> Vectors:
    """Return what a head computes with, of the model's hidden states side by side."""
    count = len(hidden_TW)
    span, rows = Span(0, 0, (0,) * count, 0), VectorRows(0, 0, count)
    plan = StepPlan(1, (span,), (), (), (), vector_rows=(rows,), features_TW=hidden_TW)
    return executor.compute(plan).vectors[0]


def _renamed(compute: Callable[[StepPlan], StepResult], token_ids_V: IntArray, plan: StepPlan) -> StepResult:
    """Compute a step of a head; what it samples are the model's ids `token_ids_V`."""
    result = compute(plan)
    return result._replace(samples=tuple(_translated(token, token_ids_V) for token in result.samples))


def _translated(token: SampledToken, token_ids_V: IntArray) -> SampledToken:
    """Return the token by its id in the model, with what it was sampled from."""
    weights_V = None if token.weights is None else translated(token.weights, token_ids_V)
    return token._replace(token_id=int(token_ids_V[token.token_id]), weights=weights_V)


def _tensors(source: HeadSource, target: ModelSource, dtype: np.dtype[Any]) -> Mapping[str, Array]:
    """Return the weights of a head: its own, and those of the model that it shares."""
    shared = source.shared(target.folder, target.spec, target.base, dtype)
    return ChainMap(source.tensors(dtype), cast("dict[str, Array]", shared))


def _mask_of(name: str, model: ModelSource) -> int:
    """Return the token that stands for one that is not known. Raises ConfigError for a model without one."""
    config = model.folder.config
    key = next((key for key in MASKS if config.get(key) is not None), None)
    if key is None:
        fix = f"its config.json has none of {', '.join(MASKS)}; write draft:{name}"
        raise ConfigError(f"{name} was not trained to draft in parallel: {fix}")
    return ConfigReader({key: config[key]}).integer(key, low=0, high=model.spec.vocab_size - 1)


def _check_states(name: str, program: Program) -> None:
    """Raise ConfigError for what drafts with recurrent layers."""
    if any(isinstance(state, RecurrentState) for state in program.states):
        why = "it has recurrent states, which it would not take back one draft at a time"
        raise ConfigError(f"{name} cannot draft: {why}; choose layers that are all attention")


def _check_vocabulary(name: str, draft: ModelSource, target_name: str, target: ModelSource) -> None:
    """Raise ConfigError unless equal ids are equal tokens, but for a few at the end of the longer vocabulary."""
    one, other = draft.folder.tokenizer(), target.folder.tokenizer()
    cannot = f"{name} cannot draft for {target_name}"
    if one is None or other is None:
        if draft.spec.vocab_size != target.spec.vocab_size:
            sizes = f"{draft.spec.vocab_size:,} and {target.spec.vocab_size:,} tokens"
            raise ConfigError(f"{cannot}: vocabularies of {sizes}, and no tokenizers to compare")
        return
    if (different := _first_difference(one, other)) is not None:
        tokens = f"{one.token(different)!r} there and {other.token(different)!r} here"
        raise ConfigError(f"{cannot}: token {different} is {tokens}; both need the same vocabulary")
    if abs(one.vocab_size - other.vocab_size) > MAX_OWN_TOKENS:
        sizes = f"{one.vocab_size:,} and {other.vocab_size:,} tokens"
        raise ConfigError(f"{cannot}: their vocabularies have {sizes}, more than {MAX_OWN_TOKENS} apart")


def _first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """Return the first id that both have a token for, and not the same one."""
    common = range(min(one.vocab_size, other.vocab_size))
    return next((token_id for token_id in common if one.token(token_id) != other.token(token_id)), None)
