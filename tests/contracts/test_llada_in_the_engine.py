"""Masked diffusion in the engine: the output is that of a plain loop over whole sequences, however it is computed.

The oracle has no cache: every step computes prompt and blocks anew.
"""

import asyncio
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import build, load_oracle, own_oracle, randomize, relative_error, tiny_config

from preemption import generate_with_preemption
from ridgeline import LLM, SamplingParams
from ridgeline.backends.reference.dense import dense_logits
from ridgeline.backends.reference.tensors import as_tensors
from ridgeline.core.config import CacheConfig, EngineConfig, ModelConfig
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import RequestError
from ridgeline.core.params import MAX_LOGIT_BIAS, DiffusionParams
from ridgeline.engine.thread_engine import ThreadEngine
from ridgeline.program.lower import lower
from ridgeline.spec import families
from ridgeline.weights.load import load_weights

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module", params=[0, 3])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("llada")
    build("llada", request.param, path)
    return path


class Oracle:
    """LLaDA's sampling, block by block, on its plain forward pass."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.model = load_oracle(folder)
        self.mask = self.config["mask_token_id"]

    @torch.no_grad()
    def logits(self, tokens, visible):
        """[T, V]; `visible[query, key]`."""
        return self.model(tokens[None], visible)[0]

    def generate(self, prompt, max_tokens, block_length, steps, threshold=None):
        """Greedy tokens; the surest stay."""
        tokens, runs = list(prompt), [0] * len(prompt)
        while len(tokens) < len(prompt) + max_tokens:
            length = min(block_length, len(prompt) + max_tokens - len(tokens))
            start = len(tokens)
            tokens += [self.mask] * length
            runs += [runs[-1] + 1] * length
            visible = torch.tensor(runs)[None] <= torch.tensor(runs)[:, None]
            left = min(steps or length, length)
            while any(token == self.mask for token in tokens[start:]):
                probabilities = self.logits(torch.tensor(tokens), visible)[start:].softmax(-1)
                probabilities_allowed = probabilities.clone()
                probabilities_allowed[:, self.mask] = 0
                best = probabilities_allowed.max(-1)
                masked = [i for i in range(length) if tokens[start + i] == self.mask]
                masked.sort(key=lambda i: -best.values[i].item())
                count = math.ceil(len(masked) / left)
                if threshold is not None:
                    count = max(1, sum(best.values[i].item() >= threshold for i in masked))
                count = len(masked) if left == 1 else count
                for i in masked[:count]:
                    tokens[start + i] = int(best.indices[i])
                left -= 1
        return tokens[len(prompt) :]


def prompt_of(vocab_size, length, seed):
    rng = random.Random(seed)
    return [rng.randrange(vocab_size - 1) for _ in range(length)]


def llm_of(folder, backend, **options):
    defaults = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "block_size": 4}
    return LLM(
        str(folder),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        num_threads=1,
        backend=backend,
        **(defaults | options),
    )


def test_a_whole_prompt_may_see_itself(folder):
    """As the published model computes: every token sees every other."""
    oracle, spec = Oracle(folder), families.read_spec(json.loads((folder / "config.json").read_text()))
    program = lower(spec, MAX_MODEL_LEN)
    weights = as_tensors(load_weights(folder, spec, program, FLOAT32))
    tokens = torch.tensor(prompt_of(spec.vocab_size, 21, 1))
    everything = torch.ones(21, 21, dtype=torch.bool)
    expected = oracle.logits(tokens, everything)
    actual = dense_logits(program, weights, tokens[None], visible_TT=everything)[0]
    assert relative_error(actual, expected) <= 1e-4


CASES = [
    (DiffusionParams(block_length=8), 16),
    (DiffusionParams(block_length=8, steps=2), 19),
    (DiffusionParams(block_length=5, steps=5), 13),
    (DiffusionParams(block_length=6, steps=6, threshold=0.3), 24),
]


@pytest.mark.parametrize(("options", "max_tokens"), CASES)
def test_answers_are_those_of_the_plain_loop(folder, backend, options, max_tokens):
    """Alone, batched with others of other lengths, cached, preempted: always the same tokens."""
    oracle, llm = Oracle(folder), llm_of(folder, backend)
    prompts = [prompt_of(oracle.config["vocab_size"], length, length) for length in (3, 17, 10)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, diffusion=options)
    expected = [
        oracle.generate(prompt, max_tokens, options.block_length, options.steps, options.threshold)
        for prompt in prompts
    ]
    together = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    assert together == expected
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [list(out.outputs[0].token_ids) for out in again] == expected
    assert again[1].usage.cached_tokens == 16
    preempted = generate_with_preemption(llm, prompts, params)
    assert [list(out.outputs[0].token_ids) for out in preempted] == expected


def test_blocks_arrive_whole_and_random_answers_repeat_with_their_seed(folder, backend):
    oracle, llm = Oracle(folder), llm_of(folder, backend)
    prompt = prompt_of(oracle.config["vocab_size"], 9, 5)
    options = DiffusionParams(block_length=4, steps=2, remasking="random")
    params = SamplingParams(temperature=1.5, n=3, seed=11, max_tokens=12, ignore_eos=True, diffusion=options)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0].outputs for _ in range(2))
    assert [list(out.token_ids) for out in first] == [list(out.token_ids) for out in second]
    assert len({tuple(out.token_ids) for out in first}) == 3
    assert all(len(out.token_ids) == 12 and oracle.mask not in out.token_ids for out in first)


@pytest.fixture(scope="module")
def texts_folder(shared_data, tmp_path_factory):
    """A model of masks over the 512 tokens of a real tokenizer and as many that have no text."""
    folder = tmp_path_factory.mktemp("llada_texts")
    config = tiny_config("llada", 0) | {"vocab_size": 1200, "embedding_size": 1200, "mask_token_id": 1199}
    oracle = own_oracle(config)
    randomize(oracle, 0)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(oracle.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = shared_data / "models/stories260K" / name
        if file.exists():
            (folder / name).write_bytes(file.read_bytes())
    return folder


def test_every_bias_that_a_request_may_have_is_served(texts_folder):
    """The mask is excluded beside the 1,024 entries that a request may bring; the engine outlives the request."""
    config = EngineConfig(
        model=ModelConfig(model=str(texts_folder), dtype="float32", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(block_size=4),
        num_threads=1,
    )
    bias = dict.fromkeys(range(MAX_LOGIT_BIAS), -100.0)
    options = {"temperature": 0, "ignore_eos": True, "diffusion": DiffusionParams(block_length=4)}

    async def scenario():
        engine = ThreadEngine(config)
        engine.start()
        try:
            for extra in ({"logit_bias": bias | {7: 100.0}}, {"logit_bias": bias}, {}):
                asked = engine.engine.intake.request([5, 6, 7], SamplingParams(max_tokens=12, **options, **extra))
                deltas = [delta async for delta in engine.stream(asked)]
                assert deltas[-1].finish.reason == "length", deltas[-1].finish.error
                yield [token for delta in deltas for token in delta.token_ids]
        finally:
            engine.stop()

    async def collect():
        return [tokens async for tokens in scenario()]

    forced, outside, plain = asyncio.run(collect())
    assert forced == [7] * 12
    assert all(MAX_LOGIT_BIAS <= token < 1199 for token in outside)
    assert len(plain) == 12


def test_tokens_behind_a_stop_string_are_nobodys(texts_folder):
    """A block of tokens arrives in one step: ids, log-probabilities and text end where the stop string does."""
    llm = llm_of(texts_folder, "reference")
    readable = dict.fromkeys((*range(300), *range(512, 1199)), -100.0)  # 300 .. 511 are texts of their own
    plain = SamplingParams(
        temperature=0,
        max_tokens=16,
        ignore_eos=True,
        logit_bias=readable,
        logprobs=1,
        diffusion=DiffusionParams(block_length=8),
    )
    (whole,) = (output.outputs[0] for output in llm.generate([[5, 6, 7]], plain, use_tqdm=False))
    assert len(whole.token_ids) == len(whole.logprobs) == 16
    for position in (0, 2, 9, 15):
        stop = llm.get_tokenizer().decode(whole.token_ids[position : position + 1]).strip()
        cut = replace(plain, stop=stop)
        output = llm.generate([[5, 6, 7]], cut, use_tqdm=False)[0]
        completion = output.outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == whole.text[: whole.text.index(stop)]
        assert len(completion.token_ids) <= position + 1
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert completion.logprobs == whole.logprobs[: len(completion.token_ids)]
        assert output.usage.completion_tokens == len(completion.token_ids)
        assert llm.get_tokenizer().decode(completion.token_ids).rstrip().endswith(stop)


def test_what_a_model_of_masks_cannot_do_is_refused(folder):
    llm = llm_of(folder, "reference")
    for params, what in (
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
        (SamplingParams(diffusion=DiffusionParams(block_length=24)), "pair of blocks"),
    ):
        with pytest.raises(RequestError, match=what):
            llm.generate([[1, 2, 3]], params, use_tqdm=False)
    with pytest.raises(RequestError, match="whole"):
        llm.generate([[1] * 41], SamplingParams(), use_tqdm=False)


@pytest.mark.parametrize(
    "values", [{"block_length": 0}, {"steps": 33}, {"remasking": "best"}, {"threshold": 1.5}, {"steps": 0}]
)
def test_options_out_of_range_are_refused(values):
    with pytest.raises(RequestError, match=next(iter(values))):
        DiffusionParams(**values)
