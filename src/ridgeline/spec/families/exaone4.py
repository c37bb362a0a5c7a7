"""EXAONE 4: norms behind each block and on queries and keys; where some layers slide the full ones do not rotate."""

from ridgeline.spec.common import post_norms, read_head_dim, read_llama, read_pattern_windows, read_windows, rms_norm
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.families import olmo2
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec

renames = olmo2.renames


def read(config: ConfigReader) -> DecoderSpec:
    norm, rope = rms_norm(config, 1e-5), read_rope(config, read_head_dim(config))
    window = config.optional_integer("sliding_window", 4096)
    if window is None or config.has("layer_types"):
        config.ignore("sliding_window_pattern")
        windows = read_windows(config, window, lambda index: False)
    else:
        windows = read_pattern_windows(config, window, 4)
    ropes = [rope if window is None or own is not None else None for own in windows]
    return read_llama(config, norm, ropes=ropes, windows=windows, qk_norm=norm, layer=post_norms, positions=2048)
