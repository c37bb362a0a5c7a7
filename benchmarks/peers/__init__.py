"""Ridgeline and other engines on one workload, in turn. Run as `python -m benchmarks.peers` from the checkout."""
