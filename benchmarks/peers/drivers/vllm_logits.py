"""vLLM on the CPU: log-probabilities of windows of tokens, and greedy continuations, of one folder.

usage: python vllm_logits.py MODEL THREADS CONTINUED WINDOWS.json OUT.npz [OPTIONS.json]

Each window's first CONTINUED tokens are continued greedily to its end. OPTIONS are keywords of `vllm.LLM`. The engine
runs in this process, so that the last line of stderr says why it failed.
"""

import os

import numpy as np
from logits_arguments import run
from run_vllm import set_environment


def main(model: str, threads: int, continued: int, windows: list, out: str, options: dict) -> None:
    set_environment(threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    longest = max(map(len, windows))
    sizes = {"max_model_len": longest + 1, "max_num_seqs": 4, "max_logprobs": -1, "enable_prefix_caching": False}
    llm = LLM(model, enforce_eager=True, **sizes, **options)
    found = {}
    for number, window in enumerate(windows):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
        rows = [[row[token].logprob for token in range(len(row))] for row in output.prompt_logprobs[1:]]
        found[f"logits{number}"] = np.array(rows, dtype=np.float32)
        left = max(1, len(window) - continued)
        more = SamplingParams(temperature=0, max_tokens=left, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": window[:continued]}], more, use_tqdm=False)
        found[f"greedy{number}"] = np.array(output.outputs[0].token_ids)
    np.savez(out, **found)


if __name__ == "__main__":
    run(main)
