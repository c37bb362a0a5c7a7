"""Settings that contradict each other are refused, with the option to change."""

import pytest

from ridgeline.core.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, QuantizeConfig
from ridgeline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (QuantizeConfig, {"scheme": "int3"}, "quantize must be one of int8, int4, got 'int3'"),
        (
            QuantizeConfig,
            {"scheme": "int4", "group_size": 48},
            "quantize_group_size must be one of 32, 64, 128, got 48",
        ),
        (QuantizeConfig, {"scheme": "int4", "inputs": "int4"}, "quantize_inputs must be one of int16, int8"),
        (QuantizeConfig, {"scheme": "int8", "zero_points": True}, "options of int4"),
        (QuantizeConfig, {"scheme": "int8", "group_size": 64}, "options of int4"),
        (QuantizeConfig, {"group_size": 64}, "without a scheme"),
        (QuantizeConfig, {"zero_points": True}, "without a scheme"),
        (QuantizeConfig, {"inputs": "int8"}, "without a scheme"),
        (QuantizeConfig, {"embeddings": False}, "without a scheme"),
        (BackendConfig, {"backend": "cuda"}, "backend must be one of auto, native, reference, got 'cuda'"),
        (
            EngineConfig,
            {"model": ModelConfig(model="any"), "num_threads": 4097},
            "num_threads is at most 4,096, got 4,097",
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
