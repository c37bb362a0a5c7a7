"""Mamba: selective state spaces and nothing else (arXiv 2312.00752)."""

from collections.abc import Sequence

from ridgeline.spec.common_recurrent import backbone_renames, mamba_renames, read_mamba, read_pure_mamba
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Rename


def read(config: ConfigReader) -> DecoderSpec:
    return read_pure_mamba(config, "mamba", read_mamba(config), tied=True)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    return [*backbone_renames(), *mamba_renames("backbone.layers.{i}.mixer")]
