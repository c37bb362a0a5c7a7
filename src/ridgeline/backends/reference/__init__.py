"""Implement the reference backend: the program interpreted op by op in plain torch."""
