"""Rewrite a program for another context length.

A model is lowered before it is known how many tokens fit into its cache. Only the angles of
dynamic and longrope scaling depend on that, of all that lowering writes down. Called by the engine's build. No torch.
"""

from dataclasses import replace

from ridgeline.program.op import Op, Program
from ridgeline.program.ops.attention import RopeAnglesAttrs


def for_context(program: Program, context_length: int) -> Program:
    """Return `program` for sequences of up to `context_length` tokens, no more than it was lowered for."""
    assert context_length <= program.context_length, "learned positions were checked for shorter contexts only"
    if context_length == program.context_length:
        return program
    return replace(program, ops=tuple(_fitted(op, context_length) for op in program.ops), context_length=context_length)


def _fitted(op: Op, context_length: int) -> Op:
    if not isinstance(op.attrs, RopeAnglesAttrs) or op.attrs.rope is None:
        return op
    return replace(op, attrs=RopeAnglesAttrs.of_rope(op.attrs.rope, context_length))
