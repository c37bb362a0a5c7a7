"""Rewrite a program for another context length.

A model is lowered before it is known how many tokens fit into its cache; only the angles of dynamic and longrope
scaling depend on that.
"""

from dataclasses import replace

from ridgeline.program.op import Program
from ridgeline.program.ops.attention import RopeAnglesAttrs


def for_context(program: Program, context_length: int) -> Program:
    """Return `program` for sequences of up to `context_length` tokens, no more than it was lowered for."""
    assert context_length <= program.context_length, "learned positions were checked for shorter contexts only"
    if context_length == program.context_length:
        return program
    ops = list(program.ops)
    for at, op in enumerate(ops):
        if isinstance(op.attrs, RopeAnglesAttrs) and op.attrs.rope is not None:
            ops[at] = replace(op, attrs=RopeAnglesAttrs.of_rope(op.attrs.rope, context_length))
    return replace(program, ops=tuple(ops), context_length=context_length)
