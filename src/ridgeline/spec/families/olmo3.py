"""OLMo 3: OLMo 2 with sliding windows in three layers of four; only full layers stretch their positions."""

from ridgeline.spec.common import post_norms, read_head_dim, read_llama, read_windows, rms_norm
from ridgeline.spec.common_rope import read_local_global_ropes
from ridgeline.spec.families import olmo2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec

renames = olmo2.renames


def read(config: ConfigReader) -> DecoderSpec:
    norm, head_dim = rms_norm(config, 1e-5), read_head_dim(config)
    local_rope, global_rope = read_local_global_ropes(config, head_dim, local_theta=None, global_theta=500000.0)
    windows = read_windows(config, config.optional_integer("sliding_window", 4096), lambda index: (index + 1) % 4 != 0)
    return read_llama(
        config,
        norm,
        rope=global_rope,
        ropes=[local_rope if window else global_rope for window in windows],
        windows=windows,
        bias=config.flag("attention_bias", False),
        qk_norm=norm,
        qk_norm_over="row",
        layer=post_norms,
        positions=2048,
    )
