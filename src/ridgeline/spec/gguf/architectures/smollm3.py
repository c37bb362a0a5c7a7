"""SmolLM3."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, paired_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "smollm3", **read_common(metadata, shapes, paired=True)}


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return paired_tensors(spec)
