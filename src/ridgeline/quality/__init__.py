"""Measure what changed numbers cost in quality: on texts that no model saw, against a base, and how sure that is."""
