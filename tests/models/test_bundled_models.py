"""The models in the box: ordinary folders, small enough, true to their cards."""

import ast
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ridgeline import LLM, SamplingParams
from ridgeline.backends.reference.dense import DenseModel
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.compress.train import bits_per_byte
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.quality import corpus
from ridgeline.spec.families import read_spec
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights

NAMES = ("python-1m", "python-9m")  # in the package; other presets are trained where they are needed
SLICE_TOKENS = 8 * 1024
SLACK_BITS = 0.25  # between the whole held-out text and a slice of it, or another Python's text


@pytest.fixture(params=NAMES)
def folder(request):
    return ModelFolder.open(request.param)


def card(folder):
    return json.loads((folder.path / "training.json").read_text())


def test_together_they_take_at_most_forty_megabytes():
    paths = [path for name in NAMES for path in ModelFolder.open(name).path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) <= 40e6


def test_the_draft_shares_the_tokenizer():
    first, second = (ModelFolder.open(name).path / "tokenizer.json" for name in NAMES)
    assert first.read_bytes() == second.read_bytes()


def test_transformers_computes_the_same(folder):
    text = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n"
    oracle = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder.path)(text)["input_ids"]
    with torch.no_grad():
        logits_TV = oracle(torch.tensor([ids])).logits[0]
    expected_TV = logits_TV.log_softmax(-1)
    llm = LLM(folder.name, dtype="float32", num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(text, params, use_tqdm=False)
    assert output.prompt_token_ids == ids
    bound = 1e-4 * logits_TV.abs().max().item()
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert abs(entry.logprob - expected_TV[position, ids[position + 1]].item()) <= bound


def test_the_card_tells_what_the_folder_is(folder):
    facts = card(folder)
    assert facts["num_parameters"] == lower(read_spec(folder.config)).num_parameters
    assert all(corpus.is_held_out(module) for module in facts["held_out_modules"])
    text = (folder.path / "README.md").read_text()
    assert f"{facts['num_parameters']:,} parameters" in text
    assert f"**{facts['held_out_bits_per_byte']:.3f}**" in text


def test_held_out_code_costs_what_the_card_says(folder):
    tokenizer = Tokenizer.from_folder(folder.path)
    _, held_out = corpus.split(corpus.standard_library())
    ids = np.asarray([i for file in held_out for i in tokenizer.encode(file.text)][:SLICE_TOKENS], dtype=np.uint16)
    spec = read_spec(folder.config)
    program = lower(spec)
    model = DenseModel(program, as_tensors(load_weights(folder, spec, program, FLOAT32)))
    num_bytes = len(tokenizer.decode(ids.tolist()).encode())
    measured = bits_per_byte(model, ids, num_bytes, torch.float32)
    assert abs(measured - card(folder)["held_out_bits_per_byte"]) < SLACK_BITS


def test_the_model_in_the_box_writes_python_that_parses():
    """Most of its functions are Python, whatever they are worth; a model that writes noise gives none."""
    llm = LLM("python-9m", dtype="float32")
    names, arguments = ("read", "parse", "find", "main"), ("path", "self", "x")
    heads = [f"def {name}({argument}):" for name in names for argument in arguments]
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=160, stop=["\ndef", "\nclass", "\n#", "\n@", "\nif"])
    outputs = llm.generate(heads, params, use_tqdm=False)
    assert sum(parses(output.prompt + output.outputs[0].text) for output in outputs) >= len(heads) // 3


def parses(source):
    """True if the source is Python, perhaps after its last, unfinished lines are dropped."""
    lines = source.split("\n")
    for count in range(len(lines), 1, -1):
        try:
            tree = ast.parse("\n".join(lines[:count]))
        except (SyntaxError, ValueError):
            continue
        return count >= min(4, len(lines)) and len(tree.body) >= 1
    return False


def test_the_head_in_its_folder_drafts_for_it():
    options = {"num_threads": 1, "deterministic": True}
    off = LLM("python-9m", **options)
    on = LLM("python-9m", **options, speculate="eagle", adaptive_speculation=False, num_speculative_tokens=3)
    prompts = ["def read_lines(path):", "class Stack:\n    def __init__(self):"]
    params = SamplingParams(temperature=0, max_tokens=64)
    outputs = [
        [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)] for llm in (off, on)
    ]
    assert outputs[0] == outputs[1]
    stats = on.engine.loop.scheduler.strategy.drafts()["eagle"]
    assert stats.num_accepted_tokens > 0.3 * stats.num_draft_tokens > 0
