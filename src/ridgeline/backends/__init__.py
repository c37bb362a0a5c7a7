"""Backends turn (program, weights, cache layout) into an Executable with one method, `run(step) -> logits`."""
