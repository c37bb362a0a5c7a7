"""Measuring: the load generator, its workloads, and the metrics, defined as vLLM defines them.

workload, workloads/ (what is asked) -> load (when) -> client (asks, keeps the times) -> metrics (what they mean)
-> report (JSON and table). Called by the command line and by benchmark scripts. Imports no torch.
"""
