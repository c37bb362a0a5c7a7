"""Gemma 3, text alone: five local layers to a global one, a rope for each kind, RMSNorm on queries and keys."""

from ridgeline.spec.common import read_pattern_windows, rms_norm
from ridgeline.spec.common_rope import read_local_global_ropes
from ridgeline.spec.families import gemma2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec

renames = gemma2.renames


def read(config: ConfigReader) -> DecoderSpec:
    config.assume(
        model_type="gemma3_text", hidden_size=2304, num_attention_heads=8, num_key_value_heads=4, intermediate_size=9216
    )
    config.ignore("_sliding_window_pattern")  # written by transformers beside the layer_types that it made of it
    head_dim = config.integer("head_dim", 256, high=1024)
    local_rope, global_rope = read_local_global_ropes(config, head_dim, local_theta=1e4, global_theta=1e6)
    windows = read_pattern_windows(config, config.optional_integer("sliding_window", 4096), 6)
    return gemma2.read_gemma(
        config,
        softcaps=(None, None),
        head_dim=head_dim,
        rope=global_rope,
        ropes=[local_rope if window else global_rope for window in windows],
        windows=windows,
        qk_norm=rms_norm(config, unit_offset=True),
        vocab_size=262_208,
        positions=131_072,
    )
