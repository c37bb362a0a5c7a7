"""Cases of the ops of mixtures of experts."""

from random import Random

from op_case import Case, nbytes

from ridgeline.program.op import Plain
from ridgeline.program.ops.experts import ExpertsAttrs, RouteAttrs, distinct_experts
from ridgeline.spec.spec import ClampedSwiGlu, Routing


def route(rng: Random) -> Case:
    groups, per_group = rng.choice([1, 1, 2, 3]), rng.randint(2, 4)
    top_groups = rng.randint(1, groups)
    routing = Routing(
        top_k=rng.randint(1, top_groups * per_group),
        scoring=rng.choice(["softmax", "sigmoid"]),
        normalize=rng.random() < 0.5,
        scale=rng.choice([1.0, 2.5]),
        num_groups=groups,
        top_groups=top_groups,
        group_score=rng.choice(["max", "top2_sum"]),
    )
    count = groups * per_group
    return Case(RouteAttrs(routing), [("T", count)], [(count,)] if rng.random() < 0.5 else [])


def experts(rng: Random) -> Case:
    count, size, width = rng.randint(1, 5), rng.randint(1, 6), rng.randint(1, 7)
    top_k = rng.randint(1, count)
    limit = rng.choice([None, None, 0.8])
    activation = rng.choice(["silu", "gelu_tanh"])
    attrs = ExpertsAttrs(activation if limit is None else ClampedSwiGlu(limit, alpha=1.7))
    weights = [(count, size, width), (count, size, width), (count, width, size)]
    if rng.random() < 0.5:
        weights += [(count, size), (count, size), (count, width)]

    def moved(inputs, outputs, tensors):
        """Of the experts, those that uniform routing is expected to choose."""
        share = distinct_experts(count, top_k, len(inputs[0])) / count
        return nbytes([*inputs, *outputs]) + share * nbytes(tensors)

    # The ids are int64 of a draw here, and int32 where `route` makes them.
    return Case(attrs, [("T", width), ("T", top_k), ("T", top_k)], weights, below={1: count}, float32={2}, moved=moved)


def gate_rows(rng: Random) -> Case:
    return Case(Plain(), [("T", rng.randint(1, 7)), ("T", 1)])


CASES = {case.__name__: case for case in (route, experts, gate_rows)}
