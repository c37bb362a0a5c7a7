"""Cases of the ops of state-space and linear-attention layers."""

from math import prod
from random import Random

from op_case import Case, nbytes

from ridgeline.program.op import RecurrentState
from ridgeline.program.ops.recurrent import CausalConvAttrs, GatedNormAttrs, RecurrentAttrs, RetentionAttrs, SsdAttrs


def stateful(shape, attrs, inputs, weights, logged) -> Case:
    """A case that keeps float32 of `shape`: written once by a span at the start of its sequence, and not read.

    It depends on the inputs `logged`.
    """

    def moved(tensors_in, tensors_out, tensors):
        return nbytes([*tensors_in, *tensors_out, *tensors]) + 4 * prod(shape)

    return Case(
        attrs,
        inputs,
        weights,
        states=[RecurrentState((shape,), (sum(prod(inputs[i][1:]) for i in logged),))],
        moved=moved,
    )


def causal_conv(rng: Random) -> Case:
    channels, taps = rng.randint(1, 5), rng.randint(2, 5)
    attrs = CausalConvAttrs(0, 0, rng.choice([None, "silu"]))
    weights = [(channels, taps), (channels,)][: rng.randint(1, 2)]
    return stateful((channels, taps - 1), attrs, [("T", channels)], weights, [0])


def selective_scan(rng: Random) -> Case:
    channels, size = rng.randint(1, 5), rng.randint(1, 4)
    x, b = ("T", channels), ("T", size)
    return stateful((channels, size), RecurrentAttrs(0, 0), [x, x, b, b], [(channels, size), (channels,)], [0, 1, 2])


def ssd(rng: Random) -> Case:
    groups, p, n = rng.randint(1, 2), rng.randint(1, 4), rng.randint(1, 4)
    heads = groups * rng.randint(1, 3)
    b, attrs = ("T", groups, n), SsdAttrs(0, 0, *rng.choice([(0.0, float("inf")), (0.0, 50.0), (1e-4, 60.0)]))
    return stateful((heads, p, n), attrs, [("T", heads, p), ("T", heads), b, b], [(heads,)] * 3, [0, 1, 2])


def delta_rule(rng: Random) -> Case:
    key_heads, k, v = rng.randint(1, 2), rng.randint(2, 4), rng.randint(1, 4)
    heads = key_heads * rng.randint(1, 3)
    q, a = ("T", key_heads, k), ("T", heads)
    return stateful(
        (heads, k, v), RecurrentAttrs(0, 0), [q, q, ("T", heads, v), a, a], [(heads,), (heads,)], [1, 2, 3, 4]
    )


def retention(rng: Random) -> Case:
    heads, k, v = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 4)
    attrs = RetentionAttrs(0, 0, tuple(rng.random() for _ in range(heads)))
    return stateful((heads, k, v), attrs, [("T", heads, k), ("T", heads, k), ("T", heads, v)], [], [1, 2])


def gated_norm(rng: Random) -> Case:
    group, groups = rng.randint(2, 4), rng.randint(1, 3)
    x = ("T", groups * group)
    return Case(GatedNormAttrs(1e-3, group, rng.random() < 0.5), [x, x], [(rng.choice([group, groups * group]),)])


CASES = {case.__name__: case for case in (causal_conv, selective_scan, ssd, delta_rule, retention, gated_norm)}
