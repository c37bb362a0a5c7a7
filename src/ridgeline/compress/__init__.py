"""Offline work on models: training, quantizing, pruning and distilling share texts, calibration and loop."""
