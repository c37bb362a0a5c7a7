"""lm-eval: choices by echo and log-probabilities, perplexity, texts by generation, with its tokenizer and with ours.

Each figure is the one that a plain request gives.
"""

import json
from pathlib import Path

from driving import FOLDER, MODEL, URL, check, command, post, run_checks

CHOICES = [("import os\nimport ", ["sys", "banana", "(((("]), ("def main(", ["):", " zebra", "%%"])]
ROWS = [{"prompt": prompt, "choices": choices, "gold": 0} for prompt, choices in CHOICES]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
SHARED = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("rows.jsonl").resolve())}},
    "test_split": "test",
    "target_delimiter": "",
}
TASKS = {
    "ours_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    },
    "ours_text": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "ours_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{prompt}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}
for task, about in TASKS.items():
    Path(f"{task}.yaml").write_text(json.dumps({"task": task, **SHARED, **about}))


def evaluate(
    out: str, tasks: str, about: str, *more: str, model: str = "local-completions", path: str = "completions"
) -> None:
    about = f"model={MODEL},base_url={URL}/v1/{path},num_concurrent=2,max_length=512,{about}"
    command(
        *("lm-eval", "run", "--model", model, "--model_args", about, "--tasks", tasks, "--include_path", "."),
        *("--output_path", out, "--log_samples", *more),
    )


def samples(out: str, name: str) -> list[dict]:
    (file,) = Path(out).glob(f"**/samples_{name}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def ids(text: str) -> list[int]:
    return post("tokenize", prompt=text, add_special_tokens=False)["tokens"]


START = post("tokenize", prompt="")["tokens"]  # what a text begins with by its tokenizer, as lm-eval loads it


def require_choices(out: str, start: list[int]) -> object:
    for sample in samples(out, "ours_choice"):
        for choice, ((logprob, _),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            prompt, whole = ids(sample["doc"]["prompt"].rstrip()), ids(sample["doc"]["prompt"] + choice)
            asked = [*start, *prompt, *whole[len(prompt) :]]  # not the whole, where tokens meet across the border
            reply = post("v1/completions", prompt=asked, echo=True, logprobs=1, max_tokens=1, temperature=0)
            expected = sum(reply["choices"][0]["logprobs"]["token_logprobs"][len(start + prompt) : len(asked)])
            assert abs(float(logprob) - expected) < 1e-3, (choice, logprob, expected)
    return logprob


def require_texts(out: str, start: list[int]) -> object:
    for sample in samples(out, "ours_text"):
        prompt = [*start, *ids(sample["doc"]["prompt"])]
        reply = post("v1/completions", prompt=prompt, max_tokens=8, temperature=0, stop=["\n\n"])
        assert sample["resps"][0][0] == reply["choices"][0]["text"]
    return reply["choices"][0]["text"]


@check
def choices_and_texts():
    evaluate("own", "ours_choice,ours_text", f"tokenizer={FOLDER}")
    return require_choices("own", START), require_texts("own", START)


@check
def batches_of_prompts():
    evaluate("batched", "ours_choice", f"tokenizer={FOLDER}", "--batch_size", "4")
    return require_choices("batched", START)


@check
def tokenizer_of_the_server():
    evaluate("remote", "ours_choice,ours_text", "tokenizer_backend=remote")
    return require_choices("remote", []), require_texts("remote", [])


@check
def perplexity():
    evaluate("rolling", "ours_perplexity", f"tokenizer={FOLDER}")
    (sample, *_) = samples("rolling", "ours_perplexity")
    return sample["resps"]


@check
def chat():
    served = {"model": "local-chat-completions", "path": "chat/completions"}
    evaluate("chat", "ours_text", "eos_string=<|endoftext|>", "--apply_chat_template", **served)
    for sample in samples("chat", "ours_text"):
        messages = [{"role": "user", "content": sample["doc"]["prompt"]}]
        asked = {"max_tokens": 8, "temperature": 0, "stop": ["\n\n"]}
        reply = post("v1/chat/completions", messages=messages, **asked)
        assert sample["resps"][0][0] == reply["choices"][0]["message"]["content"]
    return sample["resps"]


run_checks("lm-eval")
