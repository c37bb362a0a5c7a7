"""Cases of the ops in program/ops/adapters.py."""

from random import Random

from op_case import Case

from ridgeline.program.op import Plain


def lora(rng: Random) -> Case:
    wide, tall, rank, count = (rng.randint(1, 6) for _ in range(4))
    factors = [(count, rank, wide), (count, rank, tall)]
    return Case(Plain(), [("T", wide), ("T", tall), ("T",)], factors, below={2: count + 1})


CASES = {"lora": lora}
