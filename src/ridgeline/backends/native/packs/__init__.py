"""Packed weights kept on disk from one start to the next."""
