"""Offers to compute short contexts; everything else is left to the backends of the package."""

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.backends.base import BackendPlan, ModelSource, StepLimits
from ridgeline.cache.layout import CacheLayout, KvStateSize, StateSize
from ridgeline.core.config import Choice, EngineConfig
from ridgeline.program.op import KvState, Program, State

MAX_CONTEXT = 128


class CountingExecutable:
    """The reference's, which counts its steps."""

    def __init__(self, inner: object) -> None:
        self._inner, self.num_steps = inner, 0
        self.weight_bytes = inner.weight_bytes

    def run(self, step, features_TW=None):
        self.num_steps += 1
        return self._inner.run(step, features_TW)

    def timed(self, step):
        self.num_steps += 1
        return self._inner.timed(step)

    def facts(self):
        return self._inner.facts()


@dataclass(frozen=True)
class ToyPlan:
    model: ModelSource
    config: EngineConfig
    choices: Mapping[str, Choice]
    weight_bytes: int = 1 << 20
    available_bytes: int = 1 << 24
    overlaps: bool = False

    def state_size(self, state: State) -> StateSize:
        assert isinstance(state, KvState)
        return KvStateSize(state.bytes_per_token(4), state.window)

    def workspace_bytes(self, limits: StepLimits) -> int:
        return 1000 * limits.num_tokens

    def pieces(self):
        return ()

    def open(self, program: Program, layout: CacheLayout, beside: object = None) -> CountingExecutable:
        from ridgeline.backends.reference.paged import ReferenceExecutable
        from ridgeline.core.dtypes import DTYPES
        from ridgeline.weights.load import load_weights

        model = self.model
        weights = load_weights(model.folder, model.spec, model.base, DTYPES["float32"])
        return CountingExecutable(ReferenceExecutable(program, weights, layout))


class ToyBackend:
    name = "toy"
    preference = 100
    caveat = ""
    kinds = frozenset()

    def refuses(self, model: ModelSource, config: EngineConfig) -> str | None:
        if (config.model.max_model_len or model.spec.max_positions) > MAX_CONTEXT:
            return f"it has contexts of up to {MAX_CONTEXT} tokens"
        return None

    def plan(self, model: ModelSource, config: EngineConfig) -> BackendPlan:
        return ToyPlan(model, config, {"colour": Choice("blue", "toys are")})


BACKEND = ToyBackend()
