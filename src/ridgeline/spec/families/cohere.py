"""Command R: attention and feed-forward side by side behind one LayerNorm, pairs rotated, logits scaled."""

from dataclasses import replace

from ridgeline.spec.common import read_llama
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, ParallelLayer


def read(config: ConfigReader) -> DecoderSpec:
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0), bias=False)
    return read_llama(
        config,
        norm,
        theta=500000.0,
        interleaved=True,
        bias=config.flag("attention_bias", False),
        qk_norm=replace(norm, per_head=True) if config.flag("use_qk_norm", False) else None,
        layer=ParallelLayer,
        vocab_size=256000,
        positions=8192,
        head=Head(tied=True, scale=config.number("logit_scale", 0.0625)),
    )
