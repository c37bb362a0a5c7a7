"""ERNIE 4.5 (dense): Llama with pairs of each head rotated, and one switch for all biases."""

from ridgeline.spec.common import TIED, read_llama, rms_norm
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def read(config: ConfigReader) -> DecoderSpec:
    bias, norm = config.flag("use_bias", False), rms_norm(config, 1e-5)
    return read_llama(
        config, norm, theta=500000.0, interleaved=True, bias=bias, mlp_bias=bias, positions=131072, head=TIED
    )
