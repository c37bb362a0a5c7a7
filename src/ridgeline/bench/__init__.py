"""Measuring: online through a server's API, offline through an engine in this process; metrics as vLLM defines them.

Online:  workload, workloads/ (what is asked) -> load (when) -> client (asks, keeps the times) -> metrics (what they
         mean) -> report (JSON and table). These import no torch.
Offline: workload -> offline (the engine in this process) -> metrics -> offline_report.
Called by the command line and by benchmark scripts.
"""
