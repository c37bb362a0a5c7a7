"""Replace the weights of an engine that runs by others of the same model."""

from dataclasses import replace

from ridgeline.backends.select import offers, select
from ridgeline.core.config import EngineConfig
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.engine.engine import Engine
from ridgeline.engine.model import open_model
from ridgeline.weights.load import StreamedWeights


def replace_weights(engine: Engine, config: EngineConfig) -> None:
    """Compute with the weights of another configuration's model, which differs in nothing else, in place of the old.

    Call it where nothing is under way. All are read, and found whole and finite, before the first is replaced: raises
    as `build_engine` does, ConfigError for another model or other types as well, and the old ones stay.
    """
    model, name = open_model(config), config.model.model
    if model.spec != engine.spec:
        raise ConfigError(f"{name} is another model than {engine.info.model_path}: only weights may differ")
    backend, why_backend = select(model, config, offers(config.backend.backend))
    plan = backend.plan(model, replace(config, backend=replace(config.backend, tuning="default")))
    planned = {**plan.choices, "backend": why_backend}
    for what in ("backend", "dtype", "kv_dtype", "quantize"):
        if (new := planned[what].value) != (old := engine.info.choices[what].value):
            raise ConfigError(f"{name} has {what} {new}, and {old} is loaded: only weights may differ")
    for _ in StreamedWeights(model.folder, model.spec, model.base, FLOAT32).values():
        pass
    plan.replace_weights(engine.executable)
    engine.loop.scheduler.cache.reset_prefix_cache()
    if engine.draft_cache is not None:  # a head's has what it made of the old hidden states
        engine.draft_cache.reset_prefix_cache()
