"""Everything that `ridgeline inspect` prints, as data and as JSON. Must not import torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import cast

from ridgeline.backends.select import computes
from ridgeline.core.config import Choice, Dtype, KvDtype
from ridgeline.core.words import counted
from ridgeline.cost import account as cost
from ridgeline.cost.roofline import costs_of
from ridgeline.program.lower import lower
from ridgeline.program.op import Op, Program
from ridgeline.program.passes.fuse import Group, fuse
from ridgeline.program.pricing import ElementBytes, Load, OpCost
from ridgeline.quant.kv import ENTRY_BYTES, check_kv_dtype, entry_bytes
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec

DEFAULT_PROMPT_TOKENS = 1024
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost that one step has: each op alone, and each group as one (aligned with the ops and groups)."""

    name: str
    load: Load
    ops: Sequence[OpCost]
    groups: Sequence[OpCost]

    @property
    def total(self) -> OpCost:
        return sum(self.ops, OpCost())


@dataclass(slots=True)
class TensorsOfType:
    """Tensors of one type in a checkpoint, and what becomes of them when the native backend loads them."""

    type: str
    becomes: str
    num_tensors: int = 0
    num_weights: int = 0
    num_bytes: int = 0
    loaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model, and the cost of a decode step of `batch` sequences at `context` tokens and of a prefill step."""

    spec: DecoderSpec
    program: Program
    groups: Sequence[Group]
    dtype: str
    kv_dtype: str
    batch: int
    context: int  # tokens
    prompt: int  # tokens
    decode: StepCost
    prefill: StepCost
    stored: Sequence[TensorsOfType] = ()  # of a GGUF file or a quantized folder
    quality: Choice | None = None  # as it was measured, and of what

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_element(self) -> float:
        """Bytes of a key or value entry."""
        return ENTRY_BYTES[self.kv_dtype]


def examine(
    config: Mapping[str, object],
    *,
    context: int | None = None,
    batch: int = 1,
    prompt: int | None = None,
    dtype: Dtype = "auto",
    kv_dtype: Dtype | KvDtype = "auto",
) -> Inspection:
    """Read, lower and price a config.

    Raises ConfigError for a config, a context or a kv_dtype that cannot be honoured.
    """
    spec = read_spec(config)
    context = context or spec.max_positions
    prompt = prompt or min(DEFAULT_PROMPT_TOKENS, spec.max_positions)
    program = lower(spec, max(context, prompt))
    groups = fuse(program)
    weights_in = _stored_dtype(config) if dtype == "auto" else dtype
    kv_in = weights_in if kv_dtype == "auto" else kv_dtype
    check_kv_dtype(kv_in, program)
    size = DTYPE_BYTES[weights_in]
    element = ElementBytes(weight=size, activation=size, kv=entry_bytes(program, kv_in))

    def price(name: str, load: Load) -> StepCost:
        pieces = [((op.label,), element) for op in program.ops]
        joined = [(tuple(op.label for op in group.ops), element) for group in groups]
        return StepCost(name, load, costs_of(program, pieces, load), costs_of(program, joined, load))

    decode = price(f"decode of {batch:,} at {counted(context, 'token')}", Load.decode(batch, context))
    prefill = price(f"prefill of {prompt:,}", Load(((prompt, prompt),), num_rows=1))
    return Inspection(spec, program, groups, weights_in, kv_in, batch, context, prompt, decode, prefill)


def _stored_dtype(config: Mapping[str, object]) -> str:
    stored = config.get("dtype", config.get("torch_dtype"))
    return stored if isinstance(stored, str) and stored in DTYPE_BYTES else "float32"


def as_json(inspection: Inspection) -> str:
    """Render one JSON object; counts are exact, and every number's unit is in its name."""
    program, spec, kv_element = inspection.program, inspection.spec, inspection.kv_element
    declared, shared = spec.max_positions, cost.shared_kv(program, kv_element)
    document = {
        "spec": _plain(spec),
        "dtype": inspection.dtype,
        "kv_dtype": inspection.kv_dtype,
        "parameters": {
            "total": program.num_parameters,
            "active": cost.active_parameters(program),
            "embedding": cost.embedding_parameters(program),
            "head": cost.head_parameters(program),
            "num_bytes": cost.weight_bytes(program, inspection.element),
        },
        "kv": {
            "bytes_per_token": cost.kv_bytes_per_token(program, kv_element),
            "shared": {"num_layers": shared.num_layers, "spared_bytes_per_token": shared.bytes_per_token},
            "declared_context_tokens": declared,
            "bytes_at_declared_context": cost.kv_bytes(program, declared, kv_element),
            "bytes_at_context": cost.kv_bytes(program, inspection.context, kv_element),
            "groups": [
                asdict(group)
                | {"bytes_at_declared_context": group.num_bytes(declared)}
                | {"bytes_at_context": group.num_bytes(inspection.context)}
                for group in cost.kv_groups(program, kv_element)
            ],
        },
        "quality": _plain(inspection.quality),
        "stored": [_plain(tensors) for tensors in inspection.stored],
        "decode": {"batch": inspection.batch, "context_tokens": inspection.context, **_step_json(inspection.decode)},
        "prefill": {"prompt_tokens": inspection.prompt, **_step_json(inspection.prefill)},
        "ops": [
            _op_json(op, program) | {"decode": _cost_json(decode), "prefill": _cost_json(prefill)}
            for op, decode, prefill in zip(program.ops, inspection.decode.ops, inspection.prefill.ops)
        ],
        "groups": [
            {
                "kind": group.kind,
                "label": group.label,
                "ops": [op.label for op in group.ops],
                "backend": computes(group.kind),
                "decode": _cost_json(decode),
                "prefill": _cost_json(prefill),
            }
            for group, decode, prefill in zip(inspection.groups, inspection.decode.groups, inspection.prefill.groups)
        ],
    }
    return json.dumps(document)


def _step_json(step: StepCost) -> dict[str, float]:
    total, num_tokens = step.total, step.load.num_tokens
    per_token = {"flops_per_token": total.flops / num_tokens, "bytes_per_token": total.num_bytes / num_tokens}
    return _cost_json(total) | per_token


def _cost_json(priced: OpCost) -> dict[str, float]:
    return asdict(priced) | {"num_bytes": priced.num_bytes}


def _op_json(op: Op, program: Program) -> dict[str, object]:
    return {
        "kind": op.kind,
        "label": op.label,
        "inputs": {name: program.shapes[name] for name in op.inputs},
        "outputs": {name: program.shapes[name] for name in op.outputs},
        "weights": {name: program.weights[name] for name in op.weights},
        "attrs": _plain(op.attrs),
    }


def _plain(value: object) -> object:
    """Convert dataclasses to objects that name their type."""
    if is_dataclass(value):
        named = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__} | named
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    return value
