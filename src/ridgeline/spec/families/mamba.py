"""Mamba: selective state spaces and nothing else (arXiv 2312.00752)."""

from ridgeline.spec.common_recurrent import backbone_renames, mamba_renames, read_mamba, read_pure_mamba
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Renames


def read(config: ConfigReader) -> DecoderSpec:
    return read_pure_mamba(config, read_mamba(config), tied=True)


def renames(spec: DecoderSpec) -> Renames:
    return [*backbone_renames(), *mamba_renames("backbone.layers.{i}.mixer")]
