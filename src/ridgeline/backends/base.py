"""A backend makes its offers before anything is built: Backend says what it refuses, BackendPlan what it takes.

A backend's module `backend` is imported on every start: whatever is slow to import waits for `plan` or `open`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ridgeline.cache.layout import CacheLayout, StateSize
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.core.dtypes import Array
from ridgeline.cost.efficiency import OpTiming
from ridgeline.program.op import Program, State
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.lora import Adapter
from ridgeline.weights.quality import Quality

if TYPE_CHECKING:
    from ridgeline.backends.step import Executable


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to be computed: its `program` is `base` with adapters, and `folder` has the weights of `base`.

    `tensors` gives them in place of the folder, with matrices of a type: those of a head beside the model. `quality` is
    what was measured of it.
    """

    folder: ModelFolder
    spec: DecoderSpec
    base: Program
    program: Program
    adapters: Sequence[Adapter] = ()
    tensors: Callable[[np.dtype[Any]], Mapping[str, Array]] | None = None
    quality: Quality = field(default_factory=Quality)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds the largest step: tokens, rows that need logits, sequences, and tokens of the longest context."""

    num_tokens: int
    num_rows: int
    num_seqs: int
    context: int


class BackendPlan(Protocol):
    """How a backend would compute one model under one configuration, before memory is taken."""

    @property
    def choices(self) -> Mapping[str, Choice]:
        """The choices, by the name of the option, and why."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights will take."""
        ...

    @property
    def available_bytes(self) -> int:
        """Memory of the device that weights, cache and workspace may take together."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a step will be computed while the loop does something else."""
        ...

    def state_size(self, state: State) -> StateSize:
        """Return what one state of the program keeps in the cache."""
        ...

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Return the memory that the largest step takes beside weights and cache; 0 where it is not known."""
        ...

    def pieces(self) -> Sequence[OpTiming]:
        """Return what a step computes one after the other, in no time: what predictions need of a backend."""
        ...

    def open(self, program: Program, layout: CacheLayout, beside: "Executable | None" = None) -> "Executable":
        """Load the weights and take the memory. `program` is the planned one for the context length that was chosen.

        `beside` never runs at the same time: the two may share threads.
        Raises ModelLoadError for broken weights.
        """
        ...

    def replace_weights(self, executable: "Executable") -> None:
        """Load this plan's weights in place of those of an executable, between its steps: memory never has both.

        They are for the same program, in the same types. Where this raises the executable has none.
        """
        ...


class Backend(Protocol):
    """A way to compute programs. Among those that can compute a model, the one with the highest `preference` does.

    `caveat` says in a few words what is lost where a preferred backend refused; empty for nothing.
    """

    name: str
    preference: int
    caveat: str

    @property
    def kinds(self) -> Set[str]:
        """The kinds of groups that it computes as one; the ops of others are computed one by one."""
        ...

    def refuses(self, model: ModelSource, config: EngineConfig) -> str | None:
        """Return why this backend cannot compute the model as configured, None where it can."""
        ...

    def plan(self, model: ModelSource, config: EngineConfig) -> BackendPlan:
        """Choose everything that is left open. Called only where `refuses` gave None.

        Raises ConfigError for values of this backend's own options that cannot be honoured.
        """
        ...
