"""The reference backend: every model in plain torch, which `open` imports, on any machine, without native options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ridgeline.backends import host
from ridgeline.backends.base import BackendPlan, ModelSource, StepLimits
from ridgeline.cache.layout import CacheLayout, KvStateSize, RecurrentStateSize, StateSize
from ridgeline.core.config import Choice, EngineConfig, QuantizeConfig
from ridgeline.core.dtypes import Array
from ridgeline.core.errors import TORCH_IS_MISSING
from ridgeline.cost.account import weight_bytes
from ridgeline.cost.efficiency import OpTiming
from ridgeline.cost.hardware import InputKind
from ridgeline.program.op import Op, Program, RecurrentState, State
from ridgeline.program.ops.dense import MATRIX_OPS
from ridgeline.program.opset import OPSET
from ridgeline.program.pricing import ElementBytes
from ridgeline.quant import StoredFormat, chosen_format, prequantized_matrices, quantized_names
from ridgeline.quant.inputs import describe_inputs, has_integer_inputs
from ridgeline.quant.kv import SCALED, check_kv_dtype
from ridgeline.weights.load import load_weights, prequantized

if TYPE_CHECKING:
    from ridgeline.backends.step import Executable


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Everything in one dtype; quantized weights are what their integers mean."""

    model: ModelSource
    config: EngineConfig
    dtype: host.DtypeName
    num_threads: int
    choices: Mapping[str, Choice]
    integers: Mapping[str, StoredFormat]  # the matrices whose inputs are rounded, as they are stored

    @property
    def weight_bytes(self) -> int:
        return int(weight_bytes(self.model.program, host.ELEMENT_BYTES[self.dtype]))

    @property
    def available_bytes(self) -> int:
        return host.available_bytes()

    @property
    def overlaps(self) -> bool:
        return False

    def state_size(self, state: State) -> StateSize:
        if isinstance(state, RecurrentState):
            return RecurrentStateSize(state.num_bytes, state.logged_bytes)
        stored = "float32" if self.config.cache.kv_dtype in SCALED else self.dtype
        return KvStateSize(state.bytes_per_token(host.ELEMENT_BYTES[stored]), state.window)

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Return 0: torch does not tell."""
        return 0

    def pieces(self) -> Sequence[OpTiming]:
        size, is_bf16 = host.ELEMENT_BYTES[self.dtype], self.dtype == "bfloat16"
        element = ElementBytes(size, size, size)

        def inputs(op: Op) -> InputKind:
            return "bf16" if is_bf16 and op.kind in (*MATRIX_OPS, "attention") else "f32"

        return [OpTiming(op.label, op.kind, (op.label,), 0.0, element, inputs(op)) for op in self.model.program.ops]

    def open(self, program: Program, layout: CacheLayout, beside: "Executable | None" = None) -> "Executable":
        import torch

        from ridgeline.backends.reference.paged import ReferenceExecutable
        from ridgeline.backends.reference.rounding import roundings_of, with_rounded_inputs

        host.retain_freed_memory()
        torch.set_num_threads(self.num_threads)
        program = with_rounded_inputs(program, roundings_of(self.integers, self.config.quantize.inputs))
        return ReferenceExecutable(program, self._weights(program), layout, self.config.cache.kv_dtype)

    def replace_weights(self, executable: "Executable") -> None:
        from ridgeline.backends.reference.paged import ReferenceExecutable

        assert isinstance(executable, ReferenceExecutable), "a plan of this backend opened it"
        executable.load_weights({})
        executable.load_weights(self._weights(executable.program))

    def _weights(self, program: Program) -> Mapping[str, Array]:
        """Return the weights of a program, with adapters and rounded as asked."""
        from ridgeline.core.dtypes import DTYPES
        from ridgeline.quant import dequantized_weights
        from ridgeline.weights.lora import stacked

        model, dtype, quantize = self.model, DTYPES[self.dtype], self.config.quantize
        if model.tensors is not None:
            given = model.tensors(dtype)
            weights = {name: given[name] for name in program.weights}
        else:
            weights = {
                **load_weights(model.folder, model.spec, model.base, dtype),
                **stacked(model.adapters, model.program, dtype),
            }
        if quantize.scheme is not None:
            form = chosen_format(quantize)
            weights = dequantized_weights(model.program, weights, quantize.scheme, form, embeddings=quantize.embeddings)
        return weights


class ReferenceBackend:
    """The backend of every machine, and what the others are tested against."""

    name = "reference"
    preference = 0
    caveat = "slower, and without ISA levels and the deterministic mode"
    kinds = frozenset(OPSET)

    def refuses(self, model: ModelSource, config: EngineConfig) -> str | None:
        """Return that torch is missing, or the first option that only faster backends have."""
        if find_spec("torch") is None:
            return TORCH_IS_MISSING
        dtype, _ = host.choose_dtype(config.model.dtype, model.folder.config)
        lacking = {
            f"isa={config.backend.isa}": config.backend.isa is not None,
            "deterministic": config.backend.deterministic,
            f"tuning={config.backend.tuning}": config.backend.tuning not in ("auto", "default"),
            f"kv_dtype={config.cache.kv_dtype}": config.cache.kv_dtype not in ("auto", dtype, *SCALED),
        }
        asked = [option for option, is_asked in lacking.items() if is_asked]
        return f"{asked[0]} needs the native backend; leave it out" if asked else None

    def plan(self, model: ModelSource, config: EngineConfig) -> BackendPlan:
        asked = config.quantize.inputs
        config, why_inputs = host.choose_inputs(config, model.quality, encodes=model.spec.head is None)
        dtype, why_dtype = host.choose_dtype(config.model.dtype, model.folder.config)
        num_threads, why_threads = host.choose_threads(config)
        why_kv = "as asked" if config.cache.kv_dtype != "auto" else "the model's dtype"
        kv_dtype = config.cache.kv_dtype if config.cache.kv_dtype != "auto" else dtype
        check_kv_dtype(kv_dtype, model.program)
        integers = _integers(model, config.quantize)
        choices = {
            "kv_dtype": Choice(kv_dtype, why_kv),
            "quantize": host.describe_quantize(config.quantize),
            **describe_inputs(asked, why_inputs, has_integers=bool(integers)),
            "threads": why_threads,
            "dtype": why_dtype,
        }
        return ReferencePlan(model, config, dtype, num_threads, choices, integers)


BACKEND = ReferenceBackend()


def _integers(model: ModelSource, quantize: QuantizeConfig) -> Mapping[str, StoredFormat]:
    """Return the matrices that a scheme rounds, or that the checkpoint stores as integers."""
    if quantize.scheme is not None:
        names = quantized_names(model.program, embeddings=quantize.embeddings)
        forms = dict.fromkeys(names, chosen_format(quantize))
    else:
        stored = prequantized(model.folder, model.spec, model.base) if model.tensors is None else None
        forms = {} if stored is None else prequantized_matrices(stored.formats, model.base)
    return {name: form for name, form in forms.items() if has_integer_inputs(form)}
