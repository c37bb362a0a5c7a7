"""Say what is simulated: a model on this machine, as its backend would compute it, or on a device of the datasheets.

Sizes are chosen by the code that chooses them at a real start; nothing is loaded. Must not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ridgeline.backends.base import BackendPlan, StepLimits
from ridgeline.backends.host import choose_threads
from ridgeline.backends.probe import ceilings, find_native
from ridgeline.backends.select import offers, select
from ridgeline.cache.layout import CacheLayout, KvStateSize, RecurrentStateSize, StateSize
from ridgeline.cache.manager import CacheManager
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.speculation import SpeculationConfig
from ridgeline.core.words import counted
from ridgeline.cost.account import weight_bytes
from ridgeline.cost.datasheets import Datasheet, datasheet
from ridgeline.cost.efficiency import OpTiming
from ridgeline.cost.roofline import bytes_per_weight
from ridgeline.cost.steptime import StepTime, pieces_of
from ridgeline.decoding.strategies.autoregressive import Autoregressive
from ridgeline.engine.engine import setup_of
from ridgeline.engine.executor import InlineExecutor, OverlappedExecutor
from ridgeline.engine.model import embeds, open_model
from ridgeline.engine.priced import step_time_of
from ridgeline.engine.recording import EngineSetup
from ridgeline.engine.sizing import Beside, choose_sizes, require_room
from ridgeline.explain.exploration import Provenance
from ridgeline.explain.pricing import spec_of
from ridgeline.program.lower import lower
from ridgeline.program.op import Program, RecurrentState, State
from ridgeline.program.pricing import ElementBytes
from ridgeline.quant.kv import ENTRY_BYTES

if TYPE_CHECKING:
    from ridgeline.backends.step import Executable

THIS_MACHINE = "this"
DEVICE_SHARE = 0.9  # of a device's memory that an engine may take


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """Holds a model as it would be computed: its sizes, and the seconds of its steps."""

    name: str
    model: str
    setup: EngineSetup
    step_time: StepTime
    plan: BackendPlan
    program: Program
    max_positions: int

    @property
    def provenance(self) -> Provenance:
        """Where the seconds of the steps predicted so far are from: the weakest of their sources."""
        if isinstance(self.plan, _SheetPlan):
            return "datasheet"
        return "calibrated" if self.step_time.is_rest_fitted and not self.step_time.unfitted else "prior"

    def with_config(self, config: EngineConfig, beside: Beside | None = None) -> "SimulatedMachine":
        """Return the same with other limits and another cache, `beside` what drafts for it.

        Raises ConfigError where nothing fits.
        """
        return replace(self, setup=_setup(config, self.plan, self.program, self.max_positions, beside))


def simulated_machine(config: EngineConfig, hardware: str = THIS_MACHINE) -> SimulatedMachine:
    """Return the model of `config` on `this` machine or on a datasheet, NAME or NAME:COUNT.

    Raises ConfigError for what cannot be simulated or does not fit, ModelLoadError for a broken model.
    """
    if config.speculation.proposers():
        raise ConfigError(f"speculate={config.speculation.speculate} cannot be simulated here: leave it off")
    return _here(config) if hardware == THIS_MACHINE else _elsewhere(config, datasheet(hardware))


def recorded_machine(setup: EngineSetup) -> SimulatedMachine:
    """Return the model of a recording on this machine, without drafts. Raises as `simulated_machine` does."""
    return simulated_machine(replace(setup.config, speculation=SpeculationConfig()))


def _here(config: EngineConfig) -> SimulatedMachine:
    if config.backend.tuning == "auto":  # which measures where it was not measured
        config = replace(config, backend=replace(config.backend, tuning="default"))
    model = open_model(config)
    if model.spec.diffusion is not None or embeds(config.model, model.spec):
        raise ConfigError(f"{config.model.model} does not continue text, and only that can be simulated")
    backend, _ = select(model, config, offers(config.backend.backend))
    plan = backend.plan(model, config)
    hardware = ceilings(find_native(), config.backend.isa)
    num_threads, _ = choose_threads(config)
    level = hardware.machine.isa_level or "no native code"
    name = f"this machine ({hardware.machine.cpu_model}, {counted(num_threads, 'thread')}, {level})"
    program, max_positions = model.program, model.spec.max_positions
    setup, time = _setup(config, plan, program, max_positions), step_time_here(config, program, plan)
    return SimulatedMachine(name, model.folder.name, setup, time, plan, program, max_positions)


def step_time_here(config: EngineConfig, program: Program, plan: BackendPlan) -> StepTime:
    """Return the seconds of steps of `program` on this machine, with what was fitted on it."""
    return step_time_of(config, program, plan, ceilings(find_native(), config.backend.isa))


def _elsewhere(config: EngineConfig, sheet: Datasheet) -> SimulatedMachine:
    spec = spec_of(config.model.model)
    program = lower(spec)
    if sheet.memory_bytes is None and config.cache.kv_cache_bytes is None:
        raise ConfigError(f"the datasheet of {sheet.name} names no memory: give --kv-cache-bytes")
    plan = _SheetPlan(program, config, sheet)
    if plan.weight_bytes > plan.available_bytes:
        device, enough = sheet.name.partition(":")[0], -(-plan.weight_bytes * sheet.count // plan.available_bytes)
        weights = f"{config.model.model} has {plan.weight_bytes / 1e9:,.1f} GB of weights"
        memory = f"{sheet.name} {plan.available_bytes / 1e9:,.1f} GB of memory for them and the cache"
        raise ConfigError(f"{weights}, and {memory}: take {device}:{enough}, or quantize")
    require_room(plan, config, sheet.name)
    setup = _setup(config, plan, program, spec.max_positions)
    time = StepTime(program, plan.pieces(), sheet, 1, is_limit=True)
    return SimulatedMachine(sheet.title, config.model.model, setup, time, plan, program, spec.max_positions)


def _setup(
    config: EngineConfig, plan: BackendPlan, program: Program, max_positions: int, beside: Beside | None = None
) -> EngineSetup:
    sizing = choose_sizes(plan, config, program.states, max_positions, all_rows=False, beside=beside)
    ahead = plan.overlaps and CacheManager(sizing.layout).plans_ahead
    depth = (OverlappedExecutor if ahead else InlineExecutor).depth
    setup = setup_of(config, sizing, Autoregressive(), {**plan.choices, **sizing.choices}, depth)
    return replace(setup, strategy="speculative") if config.speculation.proposers() else setup


class _SheetPlan:
    """Sizes of a model on a device not here: weights in one format, activations and keys in 16 bits or as asked."""

    def __init__(self, program: Program, config: EngineConfig, sheet: Datasheet) -> None:
        self.choices: Mapping[str, Choice] = {}
        self._program, self._sheet = program, sheet
        wide = 4.0 if config.model.dtype == "float32" else 2.0
        kv = wide if config.cache.kv_dtype == "auto" else ENTRY_BYTES[config.cache.kv_dtype]
        scheme, group = config.quantize.scheme, config.quantize.group_size or 128
        int4 = bytes_per_weight("int4", group, group, zero_points=config.quantize.zero_points)
        weight = {None: wide, "int8": 1.0, "int4": int4}.get(scheme)
        if weight is None:
            raise ConfigError(f"quantize={scheme} is not priced on datasheets: int8 and int4 are")
        self._element, self._is_wide = ElementBytes(weight, wide, kv), wide == 4

    @property
    def weight_bytes(self) -> int:
        return int(weight_bytes(self._program, self._element.weight))

    @property
    def available_bytes(self) -> int:
        memory_bytes = self._sheet.memory_bytes
        return 1 << 60 if memory_bytes is None else int(DEVICE_SHARE * memory_bytes)

    @property
    def overlaps(self) -> bool:
        return False  # its steps take the least time, and nothing else takes any

    def state_size(self, state: State) -> StateSize:
        if isinstance(state, RecurrentState):
            return RecurrentStateSize(state.num_bytes, state.logged_bytes)
        return KvStateSize(state.bytes_per_token(self._element.kv), state.window)

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Return 0: what another engine takes beside weights and cache is not known."""
        return 0

    def pieces(self) -> Sequence[OpTiming]:
        return pieces_of(self._program, self._element, "f32" if self._is_wide else "bf16")

    def open(self, program: Program, layout: CacheLayout, beside: "Executable | None" = None) -> "Executable":
        """Raise: there is nothing to load."""
        raise AssertionError("a datasheet computes nothing")

    def replace_weights(self, executable: "Executable") -> None:
        """Raise, as `open` does."""
        raise AssertionError("a datasheet computes nothing")
