"""The model that drafts: opened beside the target, with weights and a cache of its own, on the same threads.

Called by `engine/build.py`. The memory for keys and values is divided so that both caches hold the same tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ridgeline.backends.base import Backend, BackendPlan, ModelSource, StepLimits
from ridgeline.backends.select import select
from ridgeline.backends.step import Executable
from ridgeline.cache.manager import CacheManager
from ridgeline.core.clock import Clock
from ridgeline.core.config import Choice, EngineConfig, SpeculationConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.step import StepPlan, StepResult
from ridgeline.decoding.drafters import Companion
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.executor import InlineExecutor
from ridgeline.engine.model import embeds, open_model
from ridgeline.engine.sizing import Beside, Sizing, bytes_per_token, choose_sizes
from ridgeline.program.op import RecurrentState
from ridgeline.program.passes.context import for_context
from ridgeline.text.tokenizer import Tokenizer

MAX_OWN_TOKENS = 128  # of either vocabulary at its end, which padding and additions explain


@dataclass(frozen=True, slots=True)
class CompanionPlan:
    """A draft model before memory is taken; `config` is the target's with the draft model for the model."""

    config: EngineConfig
    model: ModelSource
    plan: BackendPlan
    vocab_size: int
    why_backend: Choice

    @property
    def needs(self) -> Beside:
        """Return what the target has to leave free."""
        scheduler = self.config.scheduler
        limits = StepLimits(
            num_tokens=scheduler.max_num_batched_tokens,
            num_rows=scheduler.max_num_seqs,
            num_seqs=scheduler.max_num_seqs,
            context=self.config.model.max_model_len or self.model.spec.max_positions,
        )
        taken_bytes = self.plan.weight_bytes + self.plan.workspace_bytes(limits)
        return Beside(taken_bytes, bytes_per_token(self.plan, self.model.program.states))

    def open(self, target: Sizing, target_bytes_per_token: int, executable: Executable, clock: Clock) -> Companion:
        """Load the model beside the target's `executable`, with as many tokens of cache as the target has.

        Raises ConfigError where nothing fits, ModelLoadError for broken weights.
        """
        states, declared = self.model.program.states, self.model.spec.max_positions
        length = min(target.max_model_len, declared)
        own_bytes = target.layout.total_bytes * self.needs.bytes_per_token // max(target_bytes_per_token, 1)
        cache = replace(self.config.cache, kv_cache_bytes=max(own_bytes, 1))
        config = replace(self.config, cache=cache)
        sizing = choose_sizes(self.plan, config, states, length, all_rows=False)
        caches = CacheManager(sizing.layout, prefix_caching=config.cache.prefix_caching)
        opened = self.plan.open(for_context(self.model.program, sizing.max_model_len), sizing.layout, executable)
        executor = InlineExecutor(opened, Sampler(), sizing.layout, clock)
        return Companion(
            caches,
            self.vocab_size,
            sizing.max_model_len,
            config.scheduler.max_num_batched_tokens,
            self._choices(target, sizing),
            partial(computed, executor),
        )

    def _choices(self, target: Sizing, own: Sizing) -> Mapping[str, Choice]:
        length = own.max_model_len
        why_length = "that of the model" if length == target.max_model_len else "no drafts for what is longer"
        return {
            "draft_model": Choice(self.model.folder.name, f"as asked; {self.plan.weight_bytes:,} bytes of weights"),
            "draft_backend": self.why_backend,
            "draft_max_model_len": Choice(str(length), why_length),
            "draft_kv_cache_bytes": Choice(f"{own.layout.total_bytes:,}", "as many tokens as the model's own cache"),
        }


def computed(executor: InlineExecutor, plan: StepPlan) -> StepResult:
    """Compute a plan now."""
    executor.submit(plan)
    return executor.collect()


def plan_companion(name: str, config: EngineConfig, target: ModelSource, offered: Sequence[Backend]) -> CompanionPlan:
    """Return the model that drafts for `target`.

    It has the target's options where they concern it, quantization included.

    Raises ConfigError for one that cannot draft for the target, ModelLoadError for broken files.
    """
    asked = replace(config.model, model=name, revision=None, task="generate", max_model_len=None)
    own = replace(config, model=asked, speculation=SpeculationConfig(), adapters={})
    model = open_model(own)
    if model.spec.diffusion is not None or embeds(asked, model.spec):
        raise ConfigError(f"{name} cannot draft: it does not continue text token by token")
    for role, source in (("draft", model), ("verify drafts", target)):
        if any(isinstance(state, RecurrentState) for state in source.program.states):
            raise ConfigError(
                f"{source.folder.name} cannot {role}: it has recurrent states, which cannot be rolled back; "
                "choose a model whose layers are all attention, or speculate=off"
            )
    _check_vocabulary(name, model, config.model.model, target)
    backend, why_backend = select(model, own, offered)
    vocab_size = min(model.spec.vocab_size, target.spec.vocab_size)
    return CompanionPlan(own, model, backend.plan(model, own), vocab_size, why_backend)


def _check_vocabulary(name: str, draft: ModelSource, target_name: str, target: ModelSource) -> None:
    """Raise ConfigError unless equal ids are equal tokens, but for a few at the end of the longer vocabulary."""
    one, other = draft.folder.tokenizer(), target.folder.tokenizer()
    if one is None or other is None:
        if draft.spec.vocab_size != target.spec.vocab_size:
            raise ConfigError(
                f"{name} cannot draft for {target_name}: vocabularies of {draft.spec.vocab_size:,} and "
                f"{target.spec.vocab_size:,} tokens, and no tokenizers to compare"
            )
        return
    if (different := _first_difference(one, other)) is not None:
        raise ConfigError(
            f"{name} cannot draft for {target_name}: token {different} is {one.token(different)!r} there and "
            f"{other.token(different)!r} here; both need the same vocabulary"
        )
    if abs(one.vocab_size - other.vocab_size) > MAX_OWN_TOKENS:
        raise ConfigError(
            f"{name} cannot draft for {target_name}: their vocabularies have {one.vocab_size:,} and "
            f"{other.vocab_size:,} tokens, more than {MAX_OWN_TOKENS} apart"
        )


def _first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """Return the first id that both have a token for, and not the same one."""
    common = range(min(one.vocab_size, other.vocab_size))
    return next((token_id for token_id in common if one.token(token_id) != other.token(token_id)), None)
