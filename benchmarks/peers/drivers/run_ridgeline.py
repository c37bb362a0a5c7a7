"""Ridgeline. Options are keywords of `ridgeline.LLM`."""

from worker import serve


def load(job):
    from ridgeline import LLM, SamplingParams

    sizes = {key: job[key] for key in ("max_model_len", "max_num_seqs")}
    llm = LLM(job["model"], num_threads=job["threads"], **sizes, **job["options"])

    def generate(prompts, output_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load, ["ridgeline", "torch"])
