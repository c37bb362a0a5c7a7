"""llama.cpp through llama-cpp-python: one prompt after the other, with drafts where options have a number of `tokens`.

They come from its prompt lookup, or from the model whose file is `draft`. A reply has the tokens themselves.
"""

from worker import serve


def load(job):
    from llama_cpp import Llama

    def opened(path, **more):
        # With drafts it keeps the logits of whole prompts, and has room for one batch.
        sizes = {"n_ctx": job["max_model_len"], "n_batch": job["max_model_len"]}
        threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
        # How text is split does not matter to prompts of token ids, so models with a way of their own load too.
        split = {"tokenizer.ggml.pre": "gpt-2"}
        return Llama(path, **sizes, **threads, **more, kv_overrides=split, verbose=False)

    def greedy(model, prompt, count):
        tokens = model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
        return [token for _, token in zip(range(count), tokens)]

    model = opened(job["model"], draft_model=drafter(job["options"], opened, greedy))
    return lambda prompts, output_tokens: [greedy(model, prompt, output_tokens) for prompt in prompts]


def drafter(options, opened, greedy):
    """Return what drafts, as llama-cpp-python calls it, or None."""
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    tokens = options.get("tokens")
    if not tokens or not options["draft"]:
        return LlamaPromptLookupDecoding(num_pred_tokens=tokens) if tokens else None
    draft = opened(options["draft"])

    class ByModel(LlamaDraftModel):
        def __call__(self, input_ids, /, **kwargs):
            return np.array(greedy(draft, input_ids.tolist(), tokens), dtype=np.intc)

    return ByModel()


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
