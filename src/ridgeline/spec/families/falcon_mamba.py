"""Falcon-Mamba: Mamba with norms that have no weights on its step sizes, B and C (arXiv 2410.05355)."""

from ridgeline.spec.common_recurrent import read_mamba, read_pure_mamba
from ridgeline.spec.families import mamba
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, UnweightedRmsNorm

renames = mamba.renames


def read(config: ConfigReader) -> DecoderSpec:
    inner_norm = UnweightedRmsNorm(config.number("mixer_rms_eps", 1e-6, low=0.0))
    return read_pure_mamba(config, read_mamba(config, inner_norm), tied=True)
