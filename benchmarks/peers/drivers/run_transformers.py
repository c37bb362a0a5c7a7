"""transformers' `generate`. Options are keywords of `from_pretrained`. Prompts of a request are equally long."""

from worker import serve


def load(job):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16, **job["options"]).eval()

    @torch.inference_mode()
    def generate(prompts, output_tokens):
        ids = torch.tensor(prompts)
        replies = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [replies.shape[1] - ids.shape[1]] * len(prompts)

    return generate


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
