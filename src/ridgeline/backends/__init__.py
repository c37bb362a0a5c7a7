"""Backends turn (program, weights, cache layout) into an Executable with one method, `run(step) -> logits`.

`reference` interprets the program op by op in torch; it is differentiable and is the specification that every
other backend is tested against.
"""
