"""Values live until their last reader has run, and no longer."""

import random

import pytest

from families import tiny
from ridgeline.program.lower import lower
from ridgeline.program.op import STEP_INPUTS, Op
from ridgeline.program.passes.fuse import fuse
from ridgeline.program.passes.liveness import liveness
from ridgeline.spec import families


def check(parts, result):
    """Runs the parts over a set of live values."""
    lives = liveness(parts, result)
    alive, ended = set(STEP_INPUTS), set()
    for ops, ends in zip(parts, lives.ends, strict=True):
        for op in ops:
            assert alive.issuperset(op.inputs), "it is read after its end"
            alive.update(op.outputs)
        assert alive.issuperset(ends) and not ended & set(ends), "it ends once, and after it was made"
        alive -= set(ends)
        ended |= set(ends)
    unread = set(STEP_INPUTS) - {name for ops in parts for op in ops for name in op.inputs}
    assert alive == {result} | unread


@pytest.mark.parametrize("name", families.names())
def test_every_value_ends_with_its_last_reader(name):
    rng = random.Random(name)
    program = lower(families.read_spec(tiny(name, lambda *options: rng.choice(options))), 24)
    check([(op,) for op in program.ops], program.result)
    check([group.ops for group in fuse(program)], program.result)


def test_what_nobody_reads_ends_where_it_is_made():
    parts = [[Op("split", "a", ("x",), ("left", "right"))], [Op("use", "b", ("left", "left"), ("y",))]]
    lives = liveness(parts, "y")
    assert lives.ends == (("x", "right"), ("left",))
    assert lives.last_reader == {"x": 0, "left": 1, "y": 2}
