"""Offline work on models: training now; quantizing, pruning and distilling share its data and loop."""
