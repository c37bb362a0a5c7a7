"""Settings that contradict each other are refused, with the option to change."""

import pytest

from ridgeline.core.config import CacheConfig, EngineConfig, ModelConfig, QuantizeConfig
from ridgeline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (QuantizeConfig, {"scheme": "int3"}, "quantize must be one of fp8, int4, int8, mxfp4, nf4, nvfp4, got 'int3'"),
        (QuantizeConfig, {"scheme": "int4", "inputs": "int4"}, "quantize_inputs must be one of auto, int16, int8"),
        (QuantizeConfig, {"group_size": 64}, "without a scheme"),
        (QuantizeConfig, {"zero_points": True}, "without a scheme"),
        (QuantizeConfig, {"embeddings": False}, "without a scheme"),
        (
            EngineConfig,
            {"model": ModelConfig(model="any"), "num_threads": 4097},
            "num_threads must be between 1 and 4096, got 4097",
        ),
        (CacheConfig, {"kv_dtype": "float16"}, "kv_dtype must be one of auto, float32, bfloat16, int8"),
    ],
)
def test_settings_that_cannot_be(config, options, words):
    with pytest.raises(ConfigError) as refused:
        config(**options)
    assert words in str(refused.value)


def test_nothing_is_quantized_unless_asked():
    config = EngineConfig(model=ModelConfig(model="any"))
    assert (config.quantize.scheme, config.backend.backend, config.cache.kv_dtype) == (None, "auto", "auto")
