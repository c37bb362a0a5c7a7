"""EXAONE 4."""

from ridgeline.spec.gguf.common import Shapes, read_common, read_window
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "exaone4", "sliding_window": read_window(metadata), **read_common(metadata, shapes)}
