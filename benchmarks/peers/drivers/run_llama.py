"""llama.cpp through llama-cpp-python: one prompt after the other, with its prompt lookup where options have `lookup`.

`lookup` is the number of tokens that it drafts. A reply has the tokens themselves.
"""

from worker import serve


def load(job):
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = job["options"].get("lookup")
    model = Llama(
        job["model"],
        n_ctx=job["max_model_len"],
        n_batch=job["max_model_len"],  # with drafts it keeps the logits of whole prompts, and has room for one batch
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
        verbose=False,
    )

    def generate(prompts, output_tokens):
        outputs = []
        for prompt in prompts:
            tokens = model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
            outputs.append([token for _, token in zip(range(output_tokens), tokens)])
        return outputs

    return generate


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
