"""Holds what formats of quantized checkpoints share: words of small integers, groups of inputs, checks of tensors."""
