"""Which backend computes, with which instructions and which cache, and why; and the executable of that choice.

Called by `engine/build.py` before the model is built. torch only for tensors' types; native code is imported here, and
only where it is there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from ridgeline.backends.probe import find_native
from ridgeline.backends.reference import ReferenceExecutable
from ridgeline.backends.step import Executable
from ridgeline.backends.workspace import StepLimits, workspace_bytes
from ridgeline.cache.layout import CacheLayout, KvStateSize, RecurrentStateSize, StateSize
from ridgeline.core.config import Choice, EngineConfig, QuantizeConfig
from ridgeline.core.errors import ConfigError
from ridgeline.cost.account import weight_bytes
from ridgeline.program.op import KvState, LatentState, Program, RecurrentState, State
from ridgeline.program.ops.latent import LatentSizes
from ridgeline.quant import dequantized_weights, quantized_names, scheme
from ridgeline.weights.gguf.kept import GROUP, KeptWeights

if TYPE_CHECKING:
    from ridgeline.backends.native import MatrixFormat, NativeSettings
    from ridgeline.backends.native.weights import Store

Weights = Mapping[str, torch.Tensor]
DtypeName = Literal["float32", "bfloat16", "float16"]
KvDtypeName = Literal["float32", "bfloat16", "float16", "int8"]

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
MAX_HEAD_DIM = 576  # of the native attention kernels
MAX_INT8_HEAD_DIM = 256  # beyond it their sums could overflow
LOST = "slower, and without int8 keys and values, ISA levels and the deterministic mode"


@dataclass(frozen=True, slots=True)
class NativeSupport:
    """The native backend on this machine: its ISA levels, narrowest first, and the widest that is no emulation.

    `missing` says why there is none; it is empty otherwise.
    """

    levels: tuple[str, ...] = ()
    best: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What computes. `level` is the native backend's ISA level; `choices` are these values with their reasons."""

    backend: Literal["native", "reference"]
    dtype: DtypeName
    kv_dtype: KvDtypeName
    level: str
    choices: Mapping[str, Choice]

    def state_size(self, state: State) -> StateSize:
        """What one state of the program keeps."""
        if isinstance(state, RecurrentState):
            return RecurrentStateSize(state.num_bytes)
        return KvStateSize(state.bytes_per_token(ELEMENT_BYTES[self.kv_dtype]), state.window)

    def weight_bytes(self, program: Program, quantize: QuantizeConfig, kept: KeptWeights | None = None) -> int:
        """Memory that the weights take, padding not counted."""
        plain = int(weight_bytes(program, ELEMENT_BYTES[self.dtype]))
        if self.backend == "native":
            latent = [LatentSizes.of_op(program, op) for op in program.ops if op.kind == "latent_attention"]
            plain += sum(sizes.absorbed_entries for sizes in latent) * ELEMENT_BYTES[self.dtype]
        if self.backend == "native" and kept is not None:
            return plain - kept.saved_bytes(ELEMENT_BYTES[self.dtype])
        if quantize.scheme is None or self.backend == "reference":
            return plain
        chosen = scheme(quantize.scheme)
        for name in quantized_names(program, embeddings=quantize.embeddings):
            *outputs, num_inputs = program.weights[name]
            num_outputs = math.prod(outputs)
            plain -= num_outputs * num_inputs * ELEMENT_BYTES[self.dtype]
            plain += chosen.stored_bytes((num_outputs, num_inputs), quantize.group_size, quantize.zero_points)
        return plain

    def workspace_bytes(self, program: Program, limits: StepLimits) -> int:
        """Memory that the largest step takes beside weights and cache; of the reference it is not known."""
        return workspace_bytes(program, limits) if self.backend == "native" else 0


def native_support() -> NativeSupport:
    """Whether this installation has the native code, and what of it this machine runs."""
    native = find_native()
    if native.module is None:
        return NativeSupport(missing=f"this installation has no native code: {native.reason}")
    return NativeSupport(tuple(native.module.runnable_levels()), native.module.best_level())


def choose_backend(
    config: EngineConfig, dtype: DtypeName, native: NativeSupport, states: Sequence[State] = ()
) -> BackendChoice:
    """The native backend where it runs, else the reference; `dtype` is the model's, `states` what it keeps.

    Raises ConfigError for a backend that was asked for and cannot be had, and for options that it does not have.
    """
    asked = config.backend.backend
    obstacle = native.missing or _obstacle(dtype, states)
    if asked == "native" and obstacle:
        raise ConfigError(
            f"the native backend cannot be used: {obstacle}; use --backend auto, or change what prevents it"
        )
    if asked == "reference" or obstacle:
        reason = "as asked" if asked == "reference" else f"no native backend: {obstacle}; {LOST}"
        _check_reference(config, dtype, reason)
        kv_dtype, level = dtype, ""
        choices = {"backend": Choice("reference", reason)}
    else:
        kv_dtype = config.cache.kv_dtype if config.cache.kv_dtype != "auto" else dtype
        if kv_dtype == "int8":
            _check_int8(states)
        level, level_choice = _choose_level(config.backend.isa, native)
        reason = "as asked" if asked == "native" else "this machine runs it"
        choices = {"backend": Choice("native", reason), "isa": level_choice}
        if config.backend.deterministic:
            choices["deterministic"] = Choice("on", "as asked")
        asked = "native"
    why_kv = "as asked" if config.cache.kv_dtype != "auto" else "the model's dtype"
    choices |= {"kv_dtype": Choice(kv_dtype, why_kv), "quantize": _describe(config.quantize)}
    return BackendChoice("native" if level else "reference", dtype, kv_dtype, level, choices)


def _obstacle(dtype: DtypeName, states: Sequence[State]) -> str:
    """What the native backend cannot do for a model, or nothing."""
    if dtype == "float16":
        return "it does not compute in float16"
    head_dim = max((_key_entries(state) for state in states), default=0)
    if head_dim > MAX_HEAD_DIM:
        return f"it has keys of up to {MAX_HEAD_DIM} entries, and this model's have {head_dim}"
    return ""


def _key_entries(state: State) -> int:
    """Of the keys that queries meet in the cache."""
    match state:
        case KvState():
            return state.head_dim
        case LatentState():
            return state.latent_dim + state.rope_dim
        case RecurrentState():
            return 0


def _check_int8(states: Sequence[State]) -> None:
    """Raises ConfigError where keys and values cannot be kept as int8."""
    if any(isinstance(state, LatentState) for state in states):
        raise ConfigError("kv_dtype=int8 is for keys and values; this model keeps latents: use bfloat16 or float32")
    head_dim = max((_key_entries(state) for state in states), default=0)
    if head_dim > MAX_INT8_HEAD_DIM:
        raise ConfigError(
            f"kv_dtype=int8 holds heads of up to {MAX_INT8_HEAD_DIM} entries, and this model's have {head_dim}: use "
            "bfloat16 or float32"
        )


def build_executable(
    choice: BackendChoice,
    config: EngineConfig,
    program: Program,
    load: Callable[[], Weights],
    layout: CacheLayout,
    num_threads: int,
    store: "Store | None" = None,
    kept: KeptWeights | None = None,
) -> Executable:
    """The program on the chosen backend. `load` reads the weights; `store` may hold the native backend's already.

    `kept` are integers of the model file that the native backend takes as they are. With quantization the reference
    computes with what the integers mean, in float32 exactly as the native backend would without rounding the layers'
    inputs.
    """
    if choice.backend == "native":
        from ridgeline.backends.native import NativeExecutable

        settings = native_settings(choice, config, num_threads, _kept_formats(kept))
        return NativeExecutable(program, load, layout, settings, store, kept=kept)
    weights, quantize = load(), config.quantize
    if quantize.scheme is not None:
        weights = dequantized_weights(
            program,
            weights,
            quantize.scheme,
            quantize.group_size,
            quantize.zero_points,
            embeddings=quantize.embeddings,
        )
    return ReferenceExecutable(program, weights, layout)


def native_settings(
    choice: BackendChoice, config: EngineConfig, num_threads: int, kept: "Mapping[str, MatrixFormat] | None" = None
) -> "NativeSettings":
    """The choice in the native backend's terms; `kept` are the formats of single weights."""
    from ridgeline.backends.native import MatrixFormat, NativeSettings

    assert choice.dtype != "float16"
    assert choice.kv_dtype != "float16"
    plain = (
        MatrixFormat(kind="bf16", inputs="bf16")
        if choice.dtype == "bfloat16"
        else MatrixFormat(kind="f32", inputs="f32")
    )
    quantized = _matrix_format(config.quantize)
    outer = quantized if config.quantize.embeddings else None
    kv_kinds: Mapping[str, Literal["f32", "bf16", "int8"]] = {"float32": "f32", "bfloat16": "bf16", "int8": "int8"}
    return NativeSettings(
        level=choice.level,
        num_threads=num_threads,
        dtype=choice.dtype,
        matrices=quantized or plain,
        head=outer or plain,
        embeddings=outer,
        kv=kv_kinds[choice.kv_dtype],
        deterministic=config.backend.deterministic,
        kept=kept or {},
    )


def pack_settings(
    choice: BackendChoice, config: EngineConfig, program: Program, kept: KeptWeights | None = None
) -> Mapping[str, object]:
    """All that decides the native backend's packed bytes, beside the weight files themselves."""
    from ridgeline.backends.native.settings import LAYOUT_VERSION

    settings = native_settings(choice, config, 1, _kept_formats(kept))
    return {
        "layout": LAYOUT_VERSION,
        "formats": repr((settings.dtype, settings.matrices, settings.head, settings.embeddings)),
        "kept": {name: repr(form) for name, form in settings.kept.items()},
        "ops": [(op.kind, op.weights, repr(op.attrs)) for op in program.ops],
        "weights": dict(program.weights),
    }


def _kept_formats(kept: KeptWeights | None) -> "Mapping[str, MatrixFormat]":
    """Of the weights that native matrices can hold as they are stored."""
    from ridgeline.backends.native import MatrixFormat

    forms: Mapping[str, MatrixFormat] = {
        "Q8_0": MatrixFormat(kind="int8_groups", inputs="int16", group=GROUP, stored=True),
        "Q4_0": MatrixFormat(kind="int4", inputs="int16", group=GROUP, stored=True),
        "Q4_1": MatrixFormat(kind="int4_minima", inputs="int16", group=GROUP, stored=True),
    }
    return {} if kept is None else {name: forms[kind] for name, kind in kept.types.items()}


def _matrix_format(quantize: QuantizeConfig) -> "MatrixFormat | None":
    from ridgeline.backends.native import MatrixFormat

    if quantize.scheme is None:
        return None
    group = quantize.group_size if quantize.scheme == "int4" else 0
    return MatrixFormat(kind=quantize.scheme, inputs=quantize.inputs, group=group, zero_points=quantize.zero_points)


def _check_reference(config: EngineConfig, dtype: str, reason: str) -> None:
    """Raises ConfigError for the first option that only the native backend has."""
    refused = {
        f"isa={config.backend.isa}": config.backend.isa is not None,
        "deterministic": config.backend.deterministic,
        f"kv_dtype={config.cache.kv_dtype}": config.cache.kv_dtype not in ("auto", dtype),
        f"quantize_inputs={config.quantize.inputs}": config.quantize.inputs != "int16",
    }
    for option, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{option} needs the native backend, but the reference was chosen ({reason}); leave it out"
            )


def _choose_level(asked: str | None, native: NativeSupport) -> tuple[str, Choice]:
    if asked is None:
        return native.best, Choice(native.best, "the widest that this machine runs")
    if asked not in native.levels:
        raise ConfigError(f"isa {asked!r} is not one that this machine runs: {', '.join(native.levels)}")
    return asked, Choice(asked, "as asked")


def _describe(quantize: QuantizeConfig) -> Choice:
    if quantize.scheme is None:
        return Choice("none", "not asked for")
    parts = [quantize.scheme]
    if quantize.scheme == "int4":
        parts.append(f"groups of {quantize.group_size}{' with zero points' if quantize.zero_points else ''}")
    if quantize.inputs != "int16":
        parts.append(f"{quantize.inputs} inputs")
    if not quantize.embeddings:
        parts.append("but for embeddings and head")
    return Choice(", ".join(parts), "as asked")
