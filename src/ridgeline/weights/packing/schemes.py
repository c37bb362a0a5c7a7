"""How compressed-tensors describes quantized layers: read from a quantization_config, and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.core.errors import ConfigError
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.packing.scaled import Blocks
from ridgeline.weights.packing.targets import pattern

Strategy = Literal["tensor", "channel", "group", "tensor_group", "block"]
STRATEGIES: Mapping[str, Strategy] = {
    "tensor": "tensor", "channel": "channel", "group": "group", "tensor_group": "tensor_group", "block": "block",
}  # fmt: skip
# Formats that others write and that are not read, with what they are.
REFUSED = {
    "marlin-24": "2:4 sparse matrices arranged for a GPU", "sparse-24-bitmask": "sparse matrices",
    "sparse-bitmask": "sparse matrices", "mxfp6-pack-quantized": "6-bit floats",
}  # fmt: skip
FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of some layers are stored: one of the `config_groups`."""

    targets: tuple[str, ...]
    type: Literal["int", "float"]
    num_bits: int
    symmetric: bool
    strategy: Strategy
    group_size: int  # 0: all inputs
    block: tuple[int, ...]  # outputs and inputs

    @property
    def blocks(self) -> Blocks:
        """Which weights share a scale."""
        match self.strategy:
            case "tensor":
                return Blocks()
            case "channel":
                return Blocks(1)
            case "block":
                return Blocks(*self.block)
            case _:
                return Blocks(1, self.group_size)


@dataclass(frozen=True, slots=True)
class WeightSchemes:
    """The schemes of a model and the layers that have none."""

    schemes: Sequence[WeightScheme]
    ignore: Sequence[str]

    def of(self, layer: str) -> WeightScheme:
        """Return the scheme of a quantized layer: that which names it, then by pattern, then by class.

        Raises ConfigError where there is none.
        """
        if any(_names(target, layer) for target in self.ignore):
            raise ConfigError(f"quantization_config: ignore names {layer!r}, and its weight is quantized")
        for names in (_is_name, _is_pattern_of, _is_class):
            for scheme in self.schemes:
                if any(names(target, layer) for target in scheme.targets):
                    return scheme
        raise ConfigError(
            f"quantization_config: no group of config_groups names {layer!r}, and its weight is quantized"
        )


def read_schemes(settings: ConfigReader) -> WeightSchemes:
    """Read a quantization_config. Raises ConfigError for what is not supported, with its name."""
    settings.ignore("kv_cache_scheme", "global_compression_ratio", "version", "moe_sparsity_config")
    settings.expect("quantization_status", "compressed")
    settings.expect("transform_config", {}, None)
    sparsity = settings.section("sparsity_config")
    if sparsity is not None and sparsity.all_keys():
        sparsity.expect("format", "dense")
    _check_format(settings.text("format", "dense"))
    groups = settings.section("config_groups")
    if groups is None:
        raise ConfigError("quantization_config: config_groups is missing")
    ignore = settings.texts("ignore") if settings.has("ignore") else ()
    settings.ignore("ignore")
    schemes = [_read_scheme(group) for name in groups.all_keys() if (group := groups.section(name)) is not None]
    return WeightSchemes([scheme for scheme in schemes if scheme is not None], ignore)


def _check_format(name: str) -> None:
    if name not in FORMATS:
        what = f": {REFUSED[name]}" if name in REFUSED else ""
        raise ConfigError(
            f"quantization_config: format={name!r} is not supported{what}; supported: {', '.join(FORMATS)}"
        )


def _read_scheme(group: ConfigReader) -> WeightScheme | None:
    group.ignore("input_activations", "output_activations")  # inputs are rounded as --quantize-inputs says
    _check_format(group.text("format", "dense"))
    weights, targets = group.section("weights"), group.texts("targets")
    group.finish()
    if weights is None:
        return None
    weights.ignore("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")  # the tensors say it
    weights.expect("dynamic", False)
    kind: Mapping[str, Literal["int", "float"]] = {"int": "int", "float": "float"}
    type_, num_bits = weights.choice("type", kind, "int"), weights.integer("num_bits", 8)
    group_size = weights.optional_integer("group_size", low=-1, high=1 << 20) or 0
    default = "group" if group_size > 0 else "channel" if group_size else "tensor"
    strategy = weights.choice("strategy", STRATEGIES, default)
    block = weights.integers("block_structure", low=1)
    symmetric = weights.flag("symmetric", True)
    weights.finish()
    if num_bits not in (range(2, 9) if type_ == "int" else (4, 8)):
        raise ConfigError(f"quantization_config: num_bits={num_bits} of type {type_} is not supported")
    if (strategy in ("group", "tensor_group") and group_size < 1) or (strategy == "block" and len(block) != 2):
        raise ConfigError(
            f"quantization_config: strategy={strategy!r} with group_size={group_size} and "
            f"block_structure={list(block)} is not supported; a group has a group_size, a block [rows, columns]"
        )
    return WeightScheme(targets, type_, num_bits, symmetric, strategy, max(group_size, 0), block)


def _names(target: str, layer: str) -> bool:
    return _is_name(target, layer) or _is_pattern_of(target, layer)


def _is_name(target: str, layer: str) -> bool:
    return target == layer


def _is_pattern_of(target: str, layer: str) -> bool:
    return target.startswith("re:") and pattern(target.removeprefix("re:")).match(layer) is not None


def _is_class(target: str, layer: str) -> bool:
    return target.isidentifier() and target[:1].isupper()  # Linear, and what stands for it in other programs
