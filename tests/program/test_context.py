"""A program fitted to a shorter context is what lowering for that context gives."""

import random
from dataclasses import replace

import pytest

from families import tiny
from ridgeline.program.lower import lower
from ridgeline.program.ops.attention import RopeAnglesAttrs
from ridgeline.program.passes.context import for_context
from ridgeline.spec import families
from ridgeline.spec.parts import DynamicRope, LongRope, Rope

CONTEXT = 64


@pytest.mark.parametrize("name", families.names())
@pytest.mark.parametrize("seed", range(3))
def test_fitting_is_lowering_again(name, seed):
    rng = random.Random(f"{name} {seed}")
    spec = families.read_spec(tiny(name, lambda *options: rng.choice(options)))
    context = min(CONTEXT, spec.max_positions)
    for length in (context, context // 2, 1):
        assert for_context(lower(spec, context), length) == lower(spec, length)


def scaled_spec(scaling):
    spec = families.read_spec(tiny("llama", lambda *options: options[0]))
    rope = Rope(theta=10_000.0, rotary_dim=8, scaling=scaling)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, rope=rope, head_dim=8)) for layer in spec.layers)
    return replace(spec, layers=layers)


@pytest.mark.parametrize(
    "scaling",
    [DynamicRope(factor=2.0, original_context=16), LongRope((1.0,) * 4, (2.0,) * 4, 16)],
    ids=["dynamic", "longrope"],
)
def test_the_angles_follow_the_context(scaling):
    spec = scaled_spec(scaling)
    long, short = lower(spec, CONTEXT), lower(spec, 16)
    fitted = for_context(long, 16)
    assert fitted == short != long

    def angles(program):
        return [op.attrs.frequencies for op in program.ops if isinstance(op.attrs, RopeAnglesAttrs)]

    assert angles(fitted) == angles(short) != angles(long)


def test_a_context_does_not_grow():
    with pytest.raises(AssertionError, match="shorter"):
        for_context(lower(scaled_spec(DynamicRope(factor=2.0, original_context=16)), 16), 32)
