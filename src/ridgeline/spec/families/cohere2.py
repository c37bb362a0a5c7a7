"""Command R7B and Command A: Command R with three sliding layers to a full one, which has no positions."""

from dataclasses import replace

from ridgeline.spec.common import even_head_dim, read_llama, read_pattern_windows
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, ParallelLayer


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = even_head_dim(config)
    config.expect("head_dim", head_dim)
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        config.expect(key, True)
    for key in ("use_qk_norm", "use_parallel_embedding"):
        config.expect(key, False)
    config.expect("position_embedding_type", "rope_gptj")
    config.expect("rotary_pct", 1.0)
    config.expect("order_of_interleaved_layers", "local_attn_first")
    config.ignore("cache_implementation", "layer_switch")  # of transformers' cache; the pattern, in another spelling
    config.ignore("_sliding_window_pattern")
    rope = replace(read_rope(config, head_dim), interleaved=True)
    windows = read_pattern_windows(config, config.optional_integer("sliding_window", 4096), 4)
    return read_llama(
        config,
        LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0), bias=False),
        head_dim=head_dim,
        ropes=[rope if window else None for window in windows],
        windows=windows,
        bias=config.flag("attention_bias", False),
        layer=ParallelLayer,
        vocab_size=256000,
        positions=8192,
        head=Head(tied=True, scale=config.number("logit_scale", 0.0625)),
    )
