"""Passes over a Program: views and rewrites, each a function in a file of its own. No torch."""
