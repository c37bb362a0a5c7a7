"""Build a running engine from an EngineConfig. Every automatic choice becomes a value here, with the reason for it."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ridgeline.backends.select import offers, select
from ridgeline.cache.manager import CacheManager
from ridgeline.core.clock import Clock
from ridgeline.core.collector import collector_paused
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.host import HostReader
from ridgeline.decoding.strategies import choose_strategy
from ridgeline.engine.companion import plan_drafter, with_own_head
from ridgeline.engine.engine import Engine, setup_of
from ridgeline.engine.executor import open_executor
from ridgeline.engine.intake import Intake
from ridgeline.engine.loop import Deliver, EngineLoop
from ridgeline.engine.model import describe, embeds, log_choices, open_model
from ridgeline.engine.priced import PRICED, OpSeconds, StepPrices
from ridgeline.engine.recording import recorder
from ridgeline.engine.render import Renderer
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.sizing import bytes_per_token, choose_sizes, require_room
from ridgeline.program.passes.context import for_context


@collector_paused()
def build_engine(config: EngineConfig, deliver: Deliver, clock: Clock = time.monotonic) -> Engine:
    """Load the model and put the engine together; `deliver` receives every step's deltas in the loop's thread.

    `clock` is the only one that the engine reads.

    Raises ConfigError for settings that cannot be honoured and ModelLoadError for broken model files.
    """
    offered = offers(config.backend.backend)
    model = open_model(config)
    config, spec = with_own_head(config, model.folder), model.spec
    backend, why_backend = select(model, config, offered)
    all_rows = embeds(config.model, spec) or spec.diffusion is not None
    draft, model = plan_drafter(config, model, offered)
    plan = backend.plan(model, config)
    require_room(plan, config, "this machine")
    beside = None if draft is None else draft.needs
    states = model.program.states
    sizing = choose_sizes(plan, config, states, spec.max_positions, all_rows=all_rows, beside=beside)
    program = for_context(model.program, sizing.max_model_len)
    with ThreadPoolExecutor(1) as threads:  # while native code checks or packs weights
        reading = threads.submit(model.folder.tokenizer)
        executable = plan.open(program, sizing.layout)
        tokenizer = reading.result()
    companion = None if draft is None else draft.open(sizing, bytes_per_token(plan, states), executable, clock)
    drafting = {} if companion is None else dict(companion.choices)
    if config.speculation.rejection_sample_method == "typical":
        why = "as asked; lossy: it changes what is sampled unseeded"
        drafting["rejection_sample_method"] = Choice("typical", why)
    measured = model.quality.described()
    quality = {} if measured is None else {"quality": measured}
    choices = {**config.choices, "backend": why_backend, **plan.choices, **quality, **sizing.choices, **drafting}
    log_choices(choices)
    info = describe(model, config, sizing.max_model_len, choices, executable.weight_bytes)
    prefixes = config.cache.prefix_caching and not info.embeds  # all are pooled
    cache = CacheManager(sizing.layout, prefix_caching=prefixes)
    executor = open_executor(executable, sizing.layout, clock, ahead=cache.plans_ahead)
    kinds = cache.kinds_without_rollback()
    choose = partial(choose_strategy, spec, config, clock, embeds=info.embeds, without_rollback=kinds)
    strategy = choose(companion=companion, goes_on=executor.goes_on)
    setup = setup_of(config, sizing, strategy, choices, executor.depth)
    sizes = sizing.max_model_len, sizing.limits.num_rows
    scheduler = Scheduler(config.scheduler, cache, strategy, *sizes, clock, executor.depth, chains=executor.chains)
    loop = EngineLoop(scheduler, executor, Renderer(tokenizer), deliver, clock, HostReader().read, recorder(setup))
    intake = Intake(info, tokenizer, clock, compiles_grammars=True)
    is_priced = setup.strategy in PRICED and not info.embeds
    prices = StepPrices(config, model.program, plan, loop.journal, executor.depth, clock) if is_priced else None
    executor.observer = ops = OpSeconds(clock)
    of = spec, program, sizing.layout, tokenizer
    draft_cache = None if companion is None else companion.cache
    return Engine(info, setup, loop, executor, executable, intake, *of, ops, prices, draft_cache)
