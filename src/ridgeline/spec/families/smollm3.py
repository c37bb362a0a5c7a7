"""SmolLM3: Llama without positions in every fourth layer, which are also the ones that slide if any do."""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import MAX_LAYERS, TIED, read_head_dim, read_llama, read_windows, rms_norm
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    rotates, rope = _rotating_layers(config), read_rope(config, read_head_dim(config), default_theta=2000000.0)
    window = config.optional_integer("sliding_window")
    allowed = config.flag("use_sliding_window", False)
    return read_llama(
        config,
        rms_norm(config),
        ropes=[rope if rotating else None for rotating in rotates],
        windows=read_windows(config, window, lambda index: allowed and window is not None and not rotates[index]),
        bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        num_kv_heads=config.integer("num_key_value_heads", 4),
        positions=32768,
        head=TIED,
    )


def _rotating_layers(config: ConfigReader) -> Sequence[bool]:
    """Read which layers rotate: 1 in `no_rope_layers`, without it all but each `no_rope_layer_interval`-th."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    interval = config.integer("no_rope_layer_interval", 4)
    flags = config.integers("no_rope_layers", high=1)
    if flags and len(flags) != num_layers:
        raise ConfigError(f"config.json: no_rope_layers has {len(flags)} entries for {num_layers} layers")
    return [bool(flag) for flag in flags] or [(index + 1) % interval != 0 for index in range(num_layers)]
