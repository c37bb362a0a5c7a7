"""OLMo 2, and OLMo 3, which has a window."""

from ridgeline.spec.gguf.common import Shapes, read_common, read_window
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    common, window = read_common(metadata, shapes), read_window(metadata)
    if window is None:
        return {"model_type": "olmo2", **common}
    return {"model_type": "olmo3", "sliding_window": window, **common}
