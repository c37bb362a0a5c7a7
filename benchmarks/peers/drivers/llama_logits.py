"""llama.cpp through llama-cpp-python: the logits of windows of tokens, and greedy continuations, of one GGUF file.

usage: python llama_logits.py MODEL THREADS CONTINUED WINDOWS.json OUT.npz

Each window's first CONTINUED tokens are continued greedily to its end. It needs no more than llama-cpp-python.
"""

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama


def main(model: str, threads: int, continued: int, windows: list, out: str) -> None:
    longest = max(map(len, windows))
    shape = {"n_ctx": longest, "n_batch": longest, "n_threads": threads, "n_threads_batch": threads}
    llama = Llama(model, **shape, logits_all=True, verbose=False)
    found = {}
    for number, window in enumerate(windows):
        llama.reset()
        llama.eval(window[:-1])
        found[f"logits{number}"] = np.array(llama.scores[: len(window) - 1], dtype=np.float32)
        llama.reset()
        tokens = llama.generate(window[:continued], temp=0.0, top_k=1, repeat_penalty=1.0)
        found[f"greedy{number}"] = np.array([token for _, token in zip(range(len(window) - continued), tokens)])
    np.savez(out, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()), sys.argv[5])
