"""The loop of every driver: a line of JSON in, a line of JSON out. Standard library only: any interpreter runs it.

The first line is the job: model, threads, max_model_len, max_num_seqs, options. Every further one is {prompts,
output_tokens}: token ids in, greedy, end of sequence ignored. Only this loop takes the time, the same for all engines.
"""

import importlib.metadata
import json
import os
import sys
import time


def serve(load, packages):
    """`load(job)` gives a function (prompts, output tokens) -> each prompt's generated tokens, or their number."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print as they like: only replies may reach the parent
    generate = load(json.loads(sys.stdin.readline()))
    versions = {package: importlib.metadata.version(package) for package in packages}
    print(json.dumps({"versions": versions}), file=replies, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        started = time.perf_counter()
        counts = generate(ask["prompts"], ask["output_tokens"])
        reply = {"duration_s": time.perf_counter() - started, "output_tokens": counts}
        print(json.dumps(reply), file=replies, flush=True)
