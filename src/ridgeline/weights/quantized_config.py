"""Where model folders say how their weights are quantized: config.json's quantization_config, or a tool's own place.

Called by folder.py, so that all others find it in one place.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ridgeline.weights.jsonfile import read_json_object

KEY = "quantization_config"


def with_quantization(folder: Path, config: Mapping[str, object]) -> Mapping[str, object]:
    """Return config.json with its quantization_config where families of one model type have it.

    It may stand in `text_config`, as MLX's `quantization`, in AutoGPTQ's quantize_config.json or in ModelOpt's
    hf_quant_config.json; those get the name of their format. Raises ModelLoadError for a file that is no JSON object.
    """
    inner = config.get("text_config")
    places = (config, cast("Mapping[str, object]", inner) if isinstance(inner, dict) else {})
    found = next((place[KEY] for place in places if place.get(KEY) is not None), None)
    if isinstance(found, dict) and "quant_method" in found:
        return config if config.get(KEY) is found else {**config, KEY: found}
    if isinstance(config.get("quantization"), dict):
        own = cast("Mapping[str, object]", config["quantization"])
        return {**config, KEY: {"quant_method": "mlx", **own}}
    if found is not None:
        return {**config, KEY: found}
    for name, method in (("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")):
        if (folder / name).is_file():
            return {**config, KEY: {"quant_method": method, **read_json_object(folder / name)}}
    return config
