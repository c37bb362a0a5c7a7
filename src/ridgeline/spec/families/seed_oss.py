"""Seed-OSS: Llama with a switch of its own for the output projection's bias."""

from ridgeline.spec.common import read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore("residual_dropout")  # training only
    return read_llama(
        config,
        rms_norm(config),
        qkv_bias=config.flag("attention_bias", True),
        out_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        positions=524288,
    )
