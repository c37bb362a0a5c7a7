"""SmolLM3."""

from ridgeline.spec.gguf.common import Shapes, paired_tensors, read_common
from ridgeline.spec.reader import ConfigReader

tensors = paired_tensors


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "smollm3", **read_common(metadata, shapes, paired=True)}
