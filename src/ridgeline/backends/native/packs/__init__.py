"""Caches packed weights on disk from one start to the next."""
