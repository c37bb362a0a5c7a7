"""Shared by tests: the cost of a step by walking every op of a program, or every group."""

from ridgeline.cost.prices import Pricer, step_sizes
from ridgeline.program.pricing import ElementBytes, OpCost

PLAIN = ElementBytes()


def account(program, load, element=PLAIN):
    """Every op with its cost in a step that computes `load`, in order."""
    pricer, sizes = Pricer(program, element), step_sizes(load)
    return [(op, pricer.price(op).cost(load, sizes)) for op in program.ops]


def account_groups(program, groups, load, element=PLAIN):
    """The cost of every group; FLOPs, weights and KV memory are those of `account`.

    Values that only a group's own ops read stay in the cores, and what several of them read comes once.
    """
    pricer, sizes = Pricer(program, element), step_sizes(load)
    return [sum((price.cost(load, sizes) for price in pricer.together(group.ops)), OpCost()) for group in groups]


def total(accounts):
    """The sum of the costs."""
    return sum((cost for _, cost in accounts), OpCost())
