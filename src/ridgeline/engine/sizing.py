"""Choose context length and cache layout from a BackendPlan, with reasons: what memory leaves room for.

Knows a model by its states and its declared length alone. Called by `engine/build.py` before weights are loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.backends.base import BackendPlan, StepLimits
from ridgeline.cache import layout as layouts
from ridgeline.cache.layout import CacheLayout, KvStateSize, RecurrentStateSize, StateSize
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.words import counted
from ridgeline.decoding.draft_control import EXTRA_TOKENS
from ridgeline.program.op import State

CACHE_SHARE = 0.5  # of the free memory, for a cache whose size the user leaves open


@dataclass(frozen=True, slots=True)
class Sizing:
    """The context length in tokens, the cache and the largest step, and why they have these sizes."""

    max_model_len: int
    layout: CacheLayout
    limits: StepLimits
    choices: Mapping[str, Choice]


@dataclass(frozen=True, slots=True)
class Beside:
    """A second model takes this: bytes of weights and workspace, and of a token in its cache."""

    taken_bytes: int
    bytes_per_token: int


def choose_sizes(
    plan: BackendPlan,
    config: EngineConfig,
    states: Sequence[State],
    max_positions: int,
    *,
    all_rows: bool,
    beside: "Beside | None" = None,
) -> Sizing:
    """Return what fits beside the weights and the largest step, and `beside` another model.

    `max_positions` is the declared context length: unless another was asked for, it is halved until one sequence fits.
    `all_rows`: every token of a step has its row of results. Raises ConfigError where nothing fits.
    """
    asked, scheduler = config.model.max_model_len, config.scheduler
    sizes = [plan.state_size(state) for state in states]
    free_bytes = plan.available_bytes - plan.weight_bytes  # which come into memory later
    share = 1.0
    if beside is not None:
        free_bytes -= beside.taken_bytes
        own = bytes_per_token(plan, states)
        share = own / max(own + beside.bytes_per_token, 1)
    drafts = config.speculation.proposers() and not all_rows
    max_logged = 1 + config.speculation.max_draft_tokens(logged=True) if drafts else 0
    length = asked or max_positions
    while True:
        limits = step_limits(config, length, all_rows=all_rows)
        left_bytes = free_bytes - plan.workspace_bytes(limits)
        budget, why_budget = _choose_budget(config, sizes, length, left_bytes, share, max_logged)
        try:
            per_step = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
            layout = layouts.plan_layout(sizes, config.cache.block_size, budget, length, *per_step, max_logged)
            break
        except ConfigError:
            if asked is not None or length <= config.cache.block_size:
                raise
            length //= 2
    choices = {"max_model_len": _length_choice(length, asked, max_positions), "kv_cache_bytes": why_budget}
    return Sizing(length, layout, limits, choices)


def require_room(plan: BackendPlan, config: EngineConfig, where: str) -> None:
    """Raise ConfigError where the cache that is asked for has no room beside the weights in the memory of `where`."""
    room = max(0, plan.available_bytes - plan.weight_bytes)
    if (config.cache.kv_cache_bytes or 0) > room:
        raise ConfigError(f"kv_cache_bytes must be at most {room:,}, which {where} has beside the weights")


def step_limits(config: EngineConfig, context: int, *, all_rows: bool) -> StepLimits:
    """Return what a step may have. Rows of prompts whose own log-probabilities are asked for are not counted.

    Drafts have rows beside those of a full batch, which would get none otherwise.
    """
    scheduler, speculation = config.scheduler, config.speculation
    most = speculation.max_draft_tokens(logged=False)
    num_drafted = scheduler.max_num_seqs * most if speculation.proposers() else 0
    if speculation.adaptive_speculation:
        num_drafted = min(num_drafted, EXTRA_TOKENS[-1])
    num_rows = max(min(scheduler.max_num_seqs + num_drafted, scheduler.max_num_batched_tokens), scheduler.max_num_seqs)
    num_tokens, num_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    num_rows = num_tokens if all_rows else num_rows
    return StepLimits(num_tokens=num_tokens, num_rows=num_rows, num_seqs=num_seqs, context=context)


def _length_choice(length: int, asked: int | None, max_positions: int) -> Choice:
    if asked is not None:
        return Choice(str(length), "as asked")
    if length == max_positions:
        return Choice(str(length), "what the model declares")
    return Choice(str(length), f"of the declared {max_positions}, what one sequence can have in the cache")


def _choose_budget(
    config: EngineConfig, sizes: Sequence[StateSize], length: int, free_bytes: int, own_share: float, max_logged: int
) -> tuple[int, Choice]:
    """Return the cache's bytes: this model's `own_share` of what is asked, or enough within a part of free memory."""
    cache, max_num_seqs = config.cache, config.scheduler.max_num_seqs
    if cache.kv_cache_bytes is not None and own_share < 1:
        own_bytes = int(cache.kv_cache_bytes * own_share)
        return own_bytes, Choice(f"{own_bytes:,}", f"of {cache.kv_cache_bytes:,}, beside as many tokens of drafts")
    if cache.kv_cache_bytes is not None:
        return cache.kv_cache_bytes, Choice(f"{cache.kv_cache_bytes:,}", "as asked")
    blocks = -(-length // cache.block_size) + 1
    per_token = sum(size.bytes_per_token for size in sizes if isinstance(size, KvStateSize))
    per_sequence = sum(size.sequence_bytes(max_logged) for size in sizes if isinstance(size, RecurrentStateSize))
    wanted = max_num_seqs * (
        blocks * cache.block_size * per_token + layouts.RECURRENT_BLOCKS_PER_SEQUENCE * per_sequence
    )
    share = max(0, int(free_bytes * CACHE_SHARE * own_share))
    if wanted <= share:
        return wanted, Choice(f"{wanted:,}", f"{counted(max_num_seqs, 'sequence')} of {length} tokens")
    beside = "" if own_share == 1 else ", less a draft model's part"
    return share, Choice(f"{share:,}", f"{CACHE_SHARE:.0%} of the free memory{beside}")


def bytes_per_token(plan: BackendPlan, states: Sequence[State]) -> int:
    """Return what the cache keeps of a token, windows and recurrent states left aside."""
    sizes = [plan.state_size(state) for state in states]
    return sum(size.bytes_per_token for size in sizes if isinstance(size, KvStateSize))
