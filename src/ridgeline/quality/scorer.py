"""Scorer: the logits that a model gives every token of a known text, computed as the engine computes prompts.

It runs the backend's executable over the paged cache, one window at a time, in chunks of a step: what is measured is
what is served, with every option of the engine that changes numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ridgeline.backends.select import offers, select
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import CacheConfig, Choice, EngineConfig, SchedulerConfig
from ridgeline.core.dtypes import Float32s
from ridgeline.core.errors import ConfigError
from ridgeline.core.step import Span, StepPlan
from ridgeline.decoding.sampling import Sampler
from ridgeline.engine.batch import BatchBuilder
from ridgeline.engine.model import open_model
from ridgeline.engine.sizing import choose_sizes
from ridgeline.program.passes.context import for_context
from ridgeline.text.tokenizer import Tokenizer

CHUNK_TOKENS = 256  # of a step, each with a row of logits


class Scorer:
    """A model that is open for texts of at most `window` tokens."""

    def __init__(self, config: EngineConfig, window: int) -> None:
        """Load the model. Raises ConfigError for one that predicts no next token, and as the engine does."""
        model = open_model(config)
        if model.spec.head is None or model.spec.diffusion is not None:
            kind = "is an encoder" if model.spec.head is None else "fills in masks"
            raise ConfigError(f"{config.model.model} {kind}: it predicts no next token, so a text cannot be scored")
        config = for_windows(config, min(window, config.model.max_model_len or model.spec.max_positions))
        backend, why = select(model, config, offers(config.backend.backend))
        plan = backend.plan(model, config)
        sizing = choose_sizes(plan, config, model.program.states, model.spec.max_positions, all_rows=True)
        self.name = model.folder.name
        self.window = sizing.max_model_len
        self.vocab_size = model.spec.vocab_size
        self.choices: Mapping[str, Choice] = {"backend": why, **plan.choices}
        self._executable = plan.open(for_context(model.program, sizing.max_model_len), sizing.layout)
        self._folder, self._layout = model.folder, sizing.layout
        self._step = 0

    @property
    def weight_bytes(self) -> int:
        """The size of the weights in memory."""
        return self._executable.weight_bytes

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises ConfigError where it has none."""
        return self._folder.text_tokenizer()

    def logits(self, token_ids: Sequence[int]) -> Iterator[Float32s]:
        """Yield the logits of a text's tokens in chunks [T, V], each good until the next one is asked for."""
        cache = CacheManager(self._layout, prefix_caching=False)
        cache.admit(0, token_ids)
        builder, sampling = BatchBuilder(self._layout), Sampler().sampling_metadata((), follows=False)
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            span = Span(0, start, token_ids[start : start + CHUNK_TOKENS], 0)
            span = span._replace(num_logit_rows=span.num_tokens)
            copies = cache.reserve(0, span.end)
            assert copies is not None, "the cache has room for one sequence"
            self._step += 1
            tables = tuple((table,) for table in cache.tables(0))
            batch = builder.build(StepPlan(self._step, (span,), tables, tuple(copies), ()), sampling)
            yield self._executable.run(batch).logits_RV
            cache.commit(0, token_ids, span.end)


def for_windows(config: EngineConfig, window: int) -> EngineConfig:
    """Return the configuration for one window at a time, with nothing cached: neither prefixes nor packed weights."""
    return replace(
        config,
        model=replace(config.model, max_model_len=window),
        cache=CacheConfig(block_size=config.cache.block_size, prefix_caching=False, kv_dtype=config.cache.kv_dtype),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=CHUNK_TOKENS),
        backend=replace(config.backend, pack_cache=False),
    )
