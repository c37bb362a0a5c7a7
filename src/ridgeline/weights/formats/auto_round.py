"""Read what AutoRound writes: tensors packed as those of GPTQ's first version, or of AWQ's gemm version.

`packing_format` says which; `extra_config` has the bits and groups of single layers, by name or regular expression, 16
bits where a layer is plain. https://arxiv.org/abs/2309.05516
"""

import re
from collections.abc import Mapping, Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.formats import PackedTensor, awq, gptq, without_effect

PLAIN_BITS = 16
PATTERN = re.compile(r"[*+?^$\[(|\\]")  # what makes a name a regular expression


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    is_awq = settings.choice("packing_format", {"auto_round:auto_gptq": False, "auto_round:auto_awq": True})
    own, rules = _read(settings), settings.section("extra_config")
    layers = {name: rules.within(name, _read, {}) for name in rules.all_keys()} if rules is not None else {}
    if not is_awq:
        dynamic = {_rule(name, layer): layer for name, layer in layers.items()}
        return gptq.find(checkpoint, ConfigReader({**own, "dynamic": dynamic}))
    if other := [name for name, layer in layers.items() if {**own, **layer} != own and not _is_plain(layer)]:
        what = f"{other[0]!r} has bits or groups of its own; packed as AWQ none has"
        raise ConfigError(f"quantization_config: extra_config: {what}")
    return awq.find(checkpoint, ConfigReader(own))


def _read(settings: ConfigReader) -> Mapping[str, int | bool]:
    """Return what is said of the bits, groups and zeros of a layer, or of all."""
    settings.ignore(*without_effect("auto_round"))
    settings.expect("data_type", "int", "float", None)  # float of layers that are plain, which 16 bits say
    found = {key: settings.optional_integer(key, low=-1) for key in ("bits", "group_size")}
    sym = settings.flag("sym", True) if settings.has("sym") else None
    return {key: value for key, value in {**found, "sym": sym}.items() if value is not None}


def _is_plain(layer: Mapping[str, int | bool]) -> bool:
    return layer.get("bits", 0) >= PLAIN_BITS


def _rule(name: str, layer: Mapping[str, int | bool]) -> str:
    """Return the name as a rule of GPTQ's `dynamic`."""
    pattern = name if PATTERN.search(name) else re.escape(name) + "$"
    return ("-:" if _is_plain(layer) else "+:") + pattern
