"""Compute attention over the cache, and rotary positions."""

from collections.abc import Mapping

import torch

from ridgeline.backends.reference.memory import ReferenceOp, StepMemory, Tensors
from ridgeline.program.op import Attrs
from ridgeline.program.ops.attention import AttentionAttrs, KvWriteAttrs, RopeAnglesAttrs, RopeAttrs


def rope_angles(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, RopeAnglesAttrs)
    frequencies = torch.tensor(attrs.frequencies, dtype=torch.float32)
    angles = inputs[0].to(torch.float32)[:, None] * frequencies
    return (angles.cos() * attrs.scale, angles.sin() * attrs.scale)


def rope(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> tuple[torch.Tensor, ...]:
    """Rotate entry i against entry i + pairs of each head, or 2i against 2i + 1; the other entries pass through."""
    assert isinstance(attrs, RopeAttrs)
    cos, sin = (angle[:, None, :].to(inputs[0].dtype) for angle in inputs[1:])
    pairs = cos.shape[-1]
    passed, x, rest = inputs[0].tensor_split((attrs.offset, attrs.offset + 2 * pairs), dim=-1)
    a, b = x.unflatten(-1, (pairs, 2)).unbind(-1) if attrs.interleaved else x.split(pairs, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(turned, dim=-1).flatten(-2) if attrs.interleaved else torch.cat(turned, dim=-1)
    return (torch.cat((passed, turned, rest), dim=-1),)


def kv_write(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, KvWriteAttrs)
    memory.write(attrs.state, inputs[0], inputs[1])
    return ()


def attention(attrs: Attrs, inputs: Tensors, weights: Tensors, memory: StepMemory) -> tuple[torch.Tensor, ...]:
    assert isinstance(attrs, AttentionAttrs)
    return (memory.attend(attrs, inputs[0], inputs[1], inputs[2], weights[0] if weights else None).flatten(1),)


REFERENCE_OPS: Mapping[str, ReferenceOp] = {
    "rope_angles": rope_angles,
    "rope": rope,
    "kv_write": kv_write,
    "attention": attention,
}
