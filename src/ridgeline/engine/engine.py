"""Engine: the parts of a model that runs, as `engine/build.py` puts them together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.backends.step import Executable
from ridgeline.cache.layout import CacheLayout
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.machine import usable_cores
from ridgeline.decoding.request import SLOTS
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.decoding.strategy import Strategy
from ridgeline.engine.client import EngineInfo, EngineStats, by_adapter
from ridgeline.engine.executor import Executor
from ridgeline.engine.intake import Intake
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.priced import OpSeconds, StepPrices
from ridgeline.engine.recording import EngineSetup
from ridgeline.engine.sizing import Sizing
from ridgeline.program.op import Program
from ridgeline.spec.spec import DecoderSpec
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.lora import put, read_adapter


@dataclass(frozen=True, slots=True)
class Engine:
    """A model ready to run: what it serves, the loop that computes, and the intake that makes requests."""

    info: EngineInfo
    setup: EngineSetup
    loop: EngineLoop
    executor: Executor
    executable: Executable
    intake: Intake
    spec: DecoderSpec
    program: Program
    layout: CacheLayout
    tokenizer: Tokenizer | None
    ops: OpSeconds
    prices: StepPrices | None  # None: its steps are not priced
    draft_cache: CacheManager | None  # of what drafts beside the model

    def load_adapter(self, number: int, name: str, folder: str) -> None:
        """Load an adapter to the place of a number that no request has; any thread. Raises as `read_adapter` does."""
        adapter = read_adapter(name, folder, self.spec, self.program)
        put(adapter, number % SLOTS - 1, self.program, self.executable.adapter_factors)

    def stats(self) -> EngineStats:
        """Return the counts of now, with prices; in one thread at a time."""
        scheduler, priced = self.loop.scheduler, self.prices and self.prices.look()
        adapters = by_adapter(seq.request for seq in scheduler.running())
        looked = replace(self.loop.stats(), op_s=self.ops.by_kind.copy(), priced=priced)
        return replace(looked, draft_gain=scheduler.strategy.draft_gain(), running_adapters=adapters)


def setup_of(
    config: EngineConfig, sizing: Sizing, strategy: Strategy, choices: Mapping[str, Choice], depth: int
) -> EngineSetup:
    """Return how an engine is set up."""
    is_plain = isinstance(strategy, Autoregressive) and not config.speculation.proposers()
    return EngineSetup(
        config=config,
        layout=sizing.layout,
        max_model_len=sizing.max_model_len,
        max_num_rows=sizing.limits.num_rows,
        strategy="autoregressive" if is_plain else type(strategy).__name__.lower(),
        choices={name: f"{choice.value} ({choice.reason})" for name, choice in choices.items()},
        depth=depth,
        num_cores=usable_cores(),
    )
