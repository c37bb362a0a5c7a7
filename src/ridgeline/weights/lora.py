"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Read whole, checked against the base model's program, and stacked for the ops of `program/passes/adapt.py`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ridgeline.core.dtypes import Array, all_finite, assign, float32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.program.op import Program
from ridgeline.program.passes.adapt import adapter_weights
from ridgeline.spec import families
from ridgeline.spec.spec import DecoderSpec, Rename
from ridgeline.weights.checkpoint import Checkpoint, take_ranges
from ridgeline.weights.jsonfile import read_json_object
from ridgeline.weights.renames import Source, expand

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_RANK = 1024
# Options that change what an adapter computes, and the values that leave it at y + scale * b (a x).
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "target_parameters"), (None, [])),
    **dict.fromkeys(("alora_invocation_tokens", "trainable_token_indices"), (None,)),
}
Scale = Callable[[str, int], float]  # of a module and its rank
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.(?:default\.)?weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: for each linear weight of the program its factors a [r, I] and b^T [r, O], the scale within b."""

    name: str
    factors: Mapping[str, tuple[Array, Array]]


def read_adapter(name: str, path: str, spec: DecoderSpec, program: Program) -> Adapter:
    """Read the adapter of a folder. Raises ConfigError for a path that is none, ModelLoadError, naming file and entry,
    for one that is broken, no LoRA or unfit for the base model, or for the room that `program` has."""
    try:
        folder = Path(path).expanduser().resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # of names that cannot be, of users and of links
        folder = None
    if folder is None or not folder.is_dir():
        raise ConfigError(f"adapter {name!r}: {path!r} is not a folder")
    config = read_json_object(folder / CONFIG)
    for key, allowed in PLAIN.items():
        if key in config and config[key] not in allowed:
            raise ModelLoadError(f"{folder / CONFIG}: {key}={config[key]!r} is not supported, only {allowed[0]!r}")
    if not (folder / TENSORS).exists():
        raise ModelLoadError(f"{folder} has no {TENSORS}: save the adapter with PEFT's save_pretrained, as safetensors")
    checkpoint = Checkpoint.of_file(folder / TENSORS)
    halves: dict[str, dict[str, Array]] = {}
    for key in checkpoint.entries:
        tensor = checkpoint.tensor(key)
        match = _FACTOR.fullmatch(key.removeprefix(PREFIX))
        if match is None or tensor.ndim != 2:
            raise ModelLoadError(f"{folder / TENSORS}: {key!r} {list(tensor.shape)} is no factor of a linear layer")
        factor = float32(tensor)
        if not all_finite(factor):
            raise ModelLoadError(f"{folder / TENSORS}: tensor {key!r} has NaN or infinity; the file is damaged")
        halves.setdefault(match["module"], {})[match["factor"]] = factor
    sources = {rename.source: rename for rename in expand(families.renames(spec), spec)}
    factors: dict[str, tuple[Array, Array]] = {}
    scale = _scale(config, folder / CONFIG)
    for module, pair in halves.items():
        rename = sources.get(f"{module}.weight") or sources.get(f"model.{module}.weight")
        factors.update(_fitted(folder / TENSORS, module, pair, rename, program, scale))
    if not factors:
        raise ModelLoadError(f"{folder / TENSORS} holds no adapter")
    return Adapter(name, factors)


def stacked(adapters: Sequence[Adapter], program: Program, dtype: np.dtype[Any]) -> Mapping[str, Array]:
    """Return the factors of all adapters side by side, by program weight; smaller ranks are filled with zeros."""
    names = [name for op in program.ops if op.kind == "lora" for name in op.weights]
    weights: dict[str, Array] = {name: np.zeros(program.weights[name], dtype) for name in names}
    for index, adapter in enumerate(adapters):
        put(adapter, index, program, weights.__getitem__)
    return weights


def put(adapter: Adapter, index: int, program: Program, factors_of: Callable[[str], Array]) -> None:
    """Write an adapter's factors in place of those at `index`; what `factors_of` returns is of the program's shapes."""
    for target in {op.weights[0] for op in program.ops if op.kind == "linear"}:
        for name, factor in zip(adapter_weights(target), adapter.factors.get(target, (None, None))):
            if name in program.weights:
                rows = factors_of(name)[index]
                rows[:] = 0
                if factor is not None:
                    assign(rows[: len(factor)], factor)


def ranks(adapters: Sequence[Adapter]) -> Mapping[str, int]:
    """Return the largest rank on each linear weight that any adapter changes."""
    largest: dict[str, int] = {}
    for adapter in adapters:
        for target, (a, _) in adapter.factors.items():
            largest[target] = max(largest.get(target, 0), a.shape[0])
    return largest


def _scale(config: Mapping[str, object], path: Path) -> Scale:
    """Return what the product of a module and its rank is multiplied by: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ModelLoadError(f"{path}: lora_alpha must be a number, got {alpha!r}")
    if not isinstance(patterns, dict) or any(not isinstance(x, (int, float)) for x in patterns.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise ModelLoadError(f"{path}: alpha_pattern must give a number for each module")
    alphas, stabilised = cast("Mapping[str, float]", patterns), config.get("use_rslora") is True

    def scale(module: str, rank: int) -> float:
        found = [own for end, own in alphas.items() if module == end or module.endswith(f".{end}")]
        return (found[0] if found else alpha) / (math.sqrt(rank) if stabilised else rank)

    return scale


def _fitted(
    path: Path, module: str, pair: Mapping[str, Array], rename: Rename | None, program: Program, scale: Scale
) -> Mapping[str, tuple[Array, Array]]:
    """Return the factors on each of the program's weights that the module is made of."""
    linears = {op.weights[0] for op in program.ops if op.kind == "linear"}
    if rename is None or "{e}" in rename.source or not linears.issuperset(rename.targets):
        raise ModelLoadError(f"{path}: {module} is no linear layer of the model that can be adapted")
    if len(pair) != 2:
        raise ModelLoadError(f"{path}: {module} has only one of lora_A and lora_B")
    a, b = pair["A"], pair["B"]
    shape = (sum(program.weights[target][0] for target in rename.targets), program.weights[rename.targets[0]][1])
    most = min(program.weights.get(adapter_weights(target)[0], (0, MAX_RANK))[1] for target in rename.targets)
    if a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != shape or not 1 <= a.shape[0] <= most:
        found = f"{module} has factors {list(a.shape)} and {list(b.shape)}"
        raise ModelLoadError(f"{path}: {found}, which do not make a layer {list(shape)} of rank 1 to {most}")
    scaled, source = b * scale(module, a.shape[0]), Source(replace(rename, transpose=False))
    rows = {target: source.rows(program, target, slice(None)) for target in rename.targets}
    return {target: (a, take_ranges(scaled, 0, ranges).T) for target, ranges in rows.items()}
