"""The plain-torch meaning of each op kind: the specification of the op table.

Every function takes (attrs, inputs, weights, kv) and returns the outputs; all are differentiable. Activations keep
the dtype of the weights; norms, rope and softmax compute in fp32. Called by `interpret` below, for every executor
of this backend; which memory the keys and values live in is the business of the KvAccess passed in.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from ridgeline.backends.reference import packed
from ridgeline.program.op import (
    ActivationAttrs,
    AttentionAttrs,
    Attrs,
    EmbedAttrs,
    KvWriteAttrs,
    NormAttrs,
    Op,
    Program,
    RopeAnglesAttrs,
    SoftcapAttrs,
    SplitHeadsAttrs,
)
from ridgeline.spec.spec import Activation

Tensors = Sequence[torch.Tensor]


class KvAccess(Protocol):
    """Where keys and values are kept during one run."""

    def write(self, state: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Keeps the step's keys and values of KV state `state`."""
        ...

    def attend(
        self, attrs: AttentionAttrs, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the step's queries over everything that `attrs.state` holds of their sequences, [T, N, D]."""
        ...


Meaning = Callable[[Attrs, Tensors, Tensors, KvAccess], tuple[torch.Tensor, ...]]


def interpret(
    program: Program, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], kv: KvAccess
) -> dict[str, torch.Tensor]:
    """Runs the program's ops in order and returns the values still alive: those that no op consumes."""
    values = dict(inputs)
    for _ in interpret_each(program, weights, values, kv):
        pass
    return values


def interpret_each(
    program: Program, weights: Mapping[str, torch.Tensor], values: dict[str, torch.Tensor], kv: KvAccess
) -> Iterator[Op]:
    """`interpret` on `values`, which start as the inputs; yields each op once it is computed."""
    last_use = {name: index for index, op in enumerate(program.ops) for name in op.inputs}
    for index, op in enumerate(program.ops):
        outputs = MEANINGS[op.kind](
            op.attrs, [values[name] for name in op.inputs], [weights[name] for name in op.weights], kv
        )
        values.update(zip(op.outputs, outputs, strict=True))
        for name in set(op.inputs):
            if last_use[name] == index:
                del values[name]
        yield op


def embed(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, EmbedAttrs)
    rows = F.embedding(inputs[0], weights[0])
    # The factor is rounded to the weights' dtype first, as the models that use one were trained.
    return (rows if attrs.scale == 1.0 else rows * torch.tensor(attrs.scale, dtype=rows.dtype),)


def rmsnorm(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, NormAttrs)
    x, weight = inputs[0], weights[0]
    if not attrs.unit_offset:
        return (F.rms_norm(x, (x.shape[-1],), weight, attrs.eps),)
    normed = F.rms_norm(x.float(), (x.shape[-1],), 1.0 + weight.float(), attrs.eps)
    return (normed.to(x.dtype),)


def layernorm(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, NormAttrs)
    return (F.layer_norm(inputs[0], (inputs[0].shape[-1],), weights[0], weights[1], attrs.eps),)


def linear(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    return (packed.linear(inputs[0], weights[0], weights[1] if len(weights) > 1 else None),)


def split_heads(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, SplitHeadsAttrs)
    return (inputs[0].unflatten(-1, (attrs.num_heads, -1)),)


def rope_angles(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, RopeAnglesAttrs)
    frequencies = torch.tensor(attrs.frequencies, dtype=torch.float32)
    angles = inputs[0].to(torch.float32)[:, None] * frequencies
    return (angles.cos() * attrs.scale, angles.sin() * attrs.scale)


def rope(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    """Rotates entry i against entry i + rotary_dim / 2 of each head; entries past rotary_dim pass through."""
    x, cos, sin = inputs[0], inputs[1][:, None, :].to(inputs[0].dtype), inputs[2][:, None, :].to(inputs[0].dtype)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return (torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1),)


def kv_write(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, KvWriteAttrs)
    kv.write(attrs.state, inputs[0], inputs[1])
    return ()


def attention(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, AttentionAttrs)
    return (kv.attend(attrs, inputs[0], inputs[1], inputs[2]).flatten(1),)


def add(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    return (inputs[0] + inputs[1],)


def activation(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, ActivationAttrs)
    return (ACTIVATIONS[attrs.function](inputs[0]),)


def gated_activation(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, ActivationAttrs)
    return (ACTIVATIONS[attrs.function](inputs[0]) * inputs[1],)


def select_rows(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    return (inputs[0].index_select(0, inputs[1]),)


def lm_head(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    return (packed.linear(inputs[0], weights[0], weights[1] if len(weights) > 1 else None).float(),)


def softcap(attrs: Attrs, inputs: Tensors, weights: Tensors, kv: KvAccess) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, SoftcapAttrs)
    return (attrs.cap * torch.tanh(inputs[0] / attrs.cap),)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}

MEANINGS: Mapping[str, Meaning] = {
    "embed": embed,
    "rmsnorm": rmsnorm,
    "layernorm": layernorm,
    "linear": linear,
    "split_heads": split_heads,
    "rope_angles": rope_angles,
    "rope": rope,
    "kv_write": kv_write,
    "attention": attention,
    "add": add,
    "activation": activation,
    "gated_activation": gated_activation,
    "select_rows": select_rows,
    "lm_head": lm_head,
    "softcap": softcap,
}
