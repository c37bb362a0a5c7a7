"""Command R: attention and feed-forward side by side behind one LayerNorm, pairs rotated, logits scaled."""

from dataclasses import replace

from ridgeline.spec.common import decoder, read_attention, read_gated_mlp, read_head_dim, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, ParallelLayer


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = read_head_dim(config)
    bias = config.flag("attention_bias", False)
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0), bias=False)
    rope = replace(read_rope(config, head_dim, default_theta=500000.0), interleaved=True)
    attention = replace(
        read_attention(config, head_dim, rope, bias=bias),
        qk_norm=replace(norm, per_head=True) if config.flag("use_qk_norm", False) else None,
    )
    mlp = read_gated_mlp(config)
    head = Head(tied=True, scale=config.number("logit_scale", 0.0625))
    return decoder(config, ParallelLayer(attention, mlp, norm), norm, vocab_size=256000, positions=8192, head=head)
