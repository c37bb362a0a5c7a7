"""transformers: the logits of windows of tokens, and greedy continuations, of one folder.

usage: python transformers_logits.py MODEL THREADS CONTINUED WINDOWS.json OUT.npz [OPTIONS.json]

Each window's first CONTINUED tokens are continued greedily to its end. OPTIONS are keywords of `from_pretrained`. The
last line of stderr says why it failed.
"""

import numpy as np
import torch
from logits_arguments import run
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def main(model: str, threads: int, continued: int, windows: list, out: str, options: dict) -> None:
    torch.set_num_threads(threads)
    loaded, told = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True, **options)
    if missing := sorted(told["missing_keys"]):
        raise ValueError(f"it finds no {missing[0]}, nor {len(missing) - 1} others, and would take random numbers")
    found = {}
    for number, window in enumerate(windows):
        found[f"logits{number}"] = loaded(torch.tensor([window[:-1]])).logits[0].float().numpy()
        step, tokens = loaded(torch.tensor([window[:continued]]), use_cache=True), []
        while len(tokens) < len(window) - continued:
            tokens.append(int(step.logits[0, -1].argmax()))
            step = loaded(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)
        found[f"greedy{number}"] = np.array(tokens)
    np.savez(out, **found)


if __name__ == "__main__":
    run(main)
