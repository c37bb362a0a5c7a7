"""Training end to end on a tiny budget: corpus, tokenizer, gradients through the program, and the folder it leaves."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ridgeline import LLM, DiffusionParams, SamplingParams
from ridgeline.compress import presets
from ridgeline.compress.bpe import END_OF_TEXT, train_bpe
from ridgeline.compress.bundle import train_bundled
from ridgeline.compress.diffusion import diffusion_bits
from ridgeline.compress.train import Recipe, TextLoss, bits_per_byte, initial_model, train
from ridgeline.core.errors import ConfigError
from ridgeline.quality import corpus
from ridgeline.spec.families import read_spec

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def test_the_split_holds_out_whole_modules():
    files = corpus.standard_library()
    train_files, held_out = corpus.split(files)
    assert {file.module for file in train_files}.isdisjoint(file.module for file in held_out)
    assert len(train_files) > 10 * len(held_out) > 0
    assert not any("test" in file.path.split("/") for file in files)
    assert corpus.fingerprint(files) == corpus.fingerprint(corpus.standard_library())


def test_the_tokenizer_loses_nothing():
    texts = ["def f(x):\n\treturn 'ünïcode 🦙'\n\n\n    pass  \r\n", "a_b  =  123456", " \n\n\t x"]
    tokenizer = train_bpe([*texts, "def f(x):\n    return x\n" * 50], 300)
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert ids[0] == tokenizer.token_to_id(END_OF_TEXT) == 0
        assert tokenizer.decode(ids) == text


def test_a_pattern_is_learned_and_the_same_seed_gives_the_same_model():
    tokens = np.tile(np.arange(64, dtype=np.uint16), 200)
    recipe = Recipe(
        num_tokens=30 * 512, batch_tokens=512, sequence_lengths=(32, 64), eval_every_steps=30, dtype=torch.float32
    )

    def held_out_bits(model):
        return bits_per_byte(model, tokens[:512], 512, torch.float32)

    def run():
        spec = read_spec(TINY)
        model = initial_model(spec, recipe.seed)
        steps = list(train(model, recipe, tokens, held_out_bits, TextLoss(spec, recipe.dtype)))
        return [progress.loss for progress in steps], steps[-1].held_out

    losses, bits = run()
    assert losses[0] == pytest.approx(np.log(64), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]
    assert bits < 3
    assert run() == (losses, bits)


def test_masks_are_learned_and_the_bound_is_that_of_the_process():
    """A period of 16 tokens is known from any one of them; before training every token is one of 64."""
    config = {
        "model_type": "llada",
        "vocab_size": 65,
        "d_model": 32,
        "mlp_hidden_size": 64,
        "n_layers": 2,
        "n_heads": 4,
        "mask_token_id": 64,
        "max_sequence_length": 64,
        "weight_tying": True,
        "block_type": "llama",
    }
    tokens = np.tile(np.arange(16, dtype=np.uint16) * 4, 400)
    recipe = Recipe(
        num_tokens=100 * 512,
        batch_tokens=512,
        sequence_lengths=(64, 64),
        matrix_rate=2e-2,
        vector_rate=2e-2,
        eval_every_steps=100,
        dtype=torch.float32,
    )

    def held_out_bits(model):
        return diffusion_bits(model, tokens[:512], 512, 64, torch.float32)

    spec = read_spec(config)
    model = initial_model(spec, recipe.seed)
    steps = list(train(model, recipe, tokens, held_out_bits, TextLoss(spec, recipe.dtype)))
    assert steps[0].loss == pytest.approx(np.log(65), rel=0.25)
    assert steps[-1].held_out < 3.0  # 4 bits for who sees only that there are 16 tokens
    assert held_out_bits(model) == steps[-1].held_out


def test_training_goes_on_from_given_weights_and_a_new_token_begins_as_the_mean():
    tokens = np.tile(np.arange(64, dtype=np.uint16), 20)
    still = Recipe(num_tokens=64, batch_tokens=64, matrix_rate=0.0, vector_rate=0.0, dtype=torch.float32)
    given = initial_model(read_spec(TINY), seed=5).named_weights()
    wider = read_spec({**TINY, "vocab_size": 66})
    model = initial_model(wider, 0, given)
    assert len(list(train(model, still, tokens, lambda model: 0.0, TextLoss(wider, still.dtype)))) == 1
    for name, weight in model.named_weights().items():
        assert torch.equal(weight[: len(given[name])], given[name])
    assert torch.equal(model.named_weights()["embed.weight"][65], given["embed.weight"].mean(0))


def test_a_diffusion_model_trains_into_a_folder_that_generates(tmp_path):
    facts = train_bundled("python-1m-diffusion", tmp_path, lambda progress: None, num_tokens=8192)
    assert facts.starts_from == "python-1m"
    with pytest.raises(ConfigError, match="starts from python-1m"):
        train_bundled("python-1m-diffusion", tmp_path, print, tokenizer_folder=tmp_path)
    llm = LLM(str(tmp_path), num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=20, diffusion=DiffusionParams(block_length=8, steps=2))
    (output,) = llm.generate("def f(self):", params, use_tqdm=False)
    assert "<|mask|>" not in output.outputs[0].text


def test_a_trained_folder_is_an_ordinary_one(tmp_path):
    steps = []
    facts = train_bundled("python-1m", tmp_path, steps.append, num_tokens=8192 * 2)
    assert len(steps) == 2
    assert facts.num_parameters == 1_115_008
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["held_out_bits_per_byte"] == facts.held_out_bits_per_byte
    assert "bits per byte" in (tmp_path / "README.md").read_text()

    text = "def f(self):\n    return self.x\n"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    llm = LLM(str(tmp_path), dtype="float32", num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(text, params, use_tqdm=False)
    assert output.prompt_token_ids == ids
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry.logprob == pytest.approx(expected[position, ids[position + 1]].item(), abs=1e-3)


def test_presets_share_a_tokenizer_and_fit_the_box(tmp_path):
    assert presets.names() == ["python-1m", "python-1m-diffusion", "python-9m"]
    with pytest.raises(ConfigError, match="no preset 'python-9b'"):
        train_bundled("python-9b", tmp_path, print)


@pytest.mark.parametrize("changed", [{"recipes": 1}, {"num_tokens": 0}, {"config": None}])
def test_a_preset_that_says_what_is_not_understood_is_refused(tmp_path, monkeypatch, changed):
    stored = json.loads((presets.FOLDER / "python-1m.json").read_text())
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    (tmp_path / "mine.json").write_text(json.dumps(stored))
    assert presets.load_preset("mine").recipe().num_tokens == 8_000_000
    (tmp_path / "mine.json").write_text(json.dumps(stored | changed))
    with pytest.raises(ConfigError, match=r"mine\.json is not a preset"):
        presets.load_preset("mine")
