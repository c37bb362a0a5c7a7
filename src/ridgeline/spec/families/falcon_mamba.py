"""Falcon-Mamba: Mamba with norms that have no weights on its step sizes, B and C (arXiv 2410.05355)."""

from collections.abc import Sequence

from ridgeline.spec.common_recurrent import backbone_renames, mamba_renames, read_mamba, read_pure_mamba
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename, UnweightedRmsNorm


def read(config: ConfigReader) -> DecoderSpec:
    inner_norm = UnweightedRmsNorm(config.number("mixer_rms_eps", 1e-6, low=0.0))
    return read_pure_mamba(config, "falcon_mamba", read_mamba(config, inner_norm), tied=True)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*backbone_renames(), *mamba_renames("backbone.layers.{i}.mixer")]
