"""Attention over the cache, and rotary positions."""

from collections.abc import Mapping

import torch

from ridgeline.backends.reference.memory import Meaning, StepMemory, Tensors
from ridgeline.program.op import Attrs
from ridgeline.program.ops.attention import AttentionAttrs, KvWriteAttrs, RopeAnglesAttrs


def rope_angles(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, RopeAnglesAttrs)
    frequencies = torch.tensor(attrs.frequencies, dtype=torch.float32)
    angles = inputs[0].to(torch.float32)[:, None] * frequencies
    return (angles.cos() * attrs.scale, angles.sin() * attrs.scale)


def rope(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> tuple[torch.Tensor, ...]:
    """Rotates entry i against entry i + rotary_dim / 2 of each head; entries past rotary_dim pass through."""
    x, cos, sin = inputs[0], inputs[1][:, None, :].to(inputs[0].dtype), inputs[2][:, None, :].to(inputs[0].dtype)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return (torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1),)


def kv_write(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, KvWriteAttrs)
    memory.write(attrs.state, inputs[0], inputs[1])
    return ()


def attention(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, AttentionAttrs)
    return (memory.attend(attrs, inputs[0], inputs[1], inputs[2]).flatten(1),)


MEANINGS: Mapping[str, Meaning] = {
    "rope_angles": rope_angles,
    "rope": rope,
    "kv_write": kv_write,
    "attention": attention,
}
