"""Rotated hidden states: what a model computes stays the same, in every family that can be rotated at all."""

import pytest
import torch
from test_quantize import CONFIGS, TEXTS, folder_of, kl, logits, quantized

from families import names, tiny_config
from ridgeline.backends.reference.dense import dense_logits
from ridgeline.backends.reference.tensors import as_arrays, as_tensors
from ridgeline.compress.quantize import QuantizeJob
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.rotate import RotatedWeights
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec

# Families with LayerNorm, with norms behind a layer, or with a table that is added to the embedding.
CANNOT = {
    "bert", "bloom", "cohere", "cohere2", "exaone4", "falcon", "gemma2", "gemma3", "gemma3_text", "glm4", "gpt2",
    "gpt_bigcode", "gpt_neox", "minimax", "nemotron", "olmo2", "olmo3", "phi", "roberta", "stablelm", "xlm_roberta",
}  # fmt: skip


def drawn(program):
    """Random weights; those of norms are about one, biases are small."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) > 1
        else torch.rand(shape, generator=generator) * 0.5 + (0.75 if "norm" in name else -0.25)
        for name, shape in program.weights.items()
    }


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", names())
def test_a_rotated_model_gives_the_models_logits(name, seed):
    config = tiny_config(name, seed)
    spec = read_spec(config)
    program = lower(spec)
    can_untie = spec.head is not None and spec.head.tied and name != "llada"  # whose key for it is another
    untied = lower(read_spec(config | {"tie_word_embeddings": False})) if can_untie else program
    weights = drawn(program)
    if name in CANNOT:
        with pytest.raises(ConfigError, match=f"^{name} cannot be rotated: .* reads hidden states channel by channel"):
            RotatedWeights(name, untied, as_arrays(weights), 7)
        return
    if program is untied and "head.weight" not in untied.weights:
        with pytest.raises(ConfigError, match=f"^{name} cannot be rotated: embed.weight is used twice"):
            RotatedWeights(name, untied, as_arrays(weights), 7)
        return
    turned = as_tensors(dict(RotatedWeights(name, untied, as_arrays(weights), 7)))
    ids_BT = torch.randint(program.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    plain, same = (dense_logits(p, w, ids_BT) for p, w in ((program, weights), (untied, turned)))
    assert (same - plain).abs().max() <= 1e-4 * plain.abs().max()
    matrices = [key for key, weight in weights.items() if weight.ndim > 1 and key in turned]
    changed = [key for key in matrices if not torch.allclose(turned[key], weights[key], atol=1e-3)]
    assert {"embed.weight"} < set(changed), "something beside the table is rotated"
    norms = [weight for key, weight in turned.items() if key == "final_norm.weight"]
    assert all(float(weight.std()) == 0 for weight in norms)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rotated_folder_says_what_the_model_says(tmp_path, name):
    """Through the checkpoint's own names, with a head of its own; gemma's was tied."""
    folder = folder_of(tmp_path / "model", CONFIGS[name])
    _, made = quantized(folder, tmp_path / "out", method="rtn", bits=8, group_size=32, rotate=True)
    assert not made.config["tie_word_embeddings"]
    assert kl(logits(folder), logits(made)) < (0.01 if "experts" in str(folder.config) else 4e-3)
    _, again = quantized(folder, tmp_path / "again", method="rtn", bits=8, group_size=32, rotate=True)
    files = [sorted(path.glob("*.safetensors")) for path in (made.path, again.path)]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_outliers_of_a_channel_cost_a_rotated_model_less(tmp_path):
    """A channel of hidden states in each group of inputs whose weights are 30 times the others'."""

    def plant(weights):
        for name, weight in weights.items():
            if name.endswith(("q.weight", "k.weight", "v.weight", "gate.weight", "up.weight")):
                weight[..., ::32] *= 30
            elif name == "embed.weight" or name.endswith(("o.weight", "down.weight")):
                (weight if name == "embed.weight" else weight.T)[..., ::32] /= 30

    folder = folder_of(tmp_path / "model", CONFIGS["llama"], change=plant)
    base, options = logits(folder), {"method": "rtn", "group_size": 32}
    plain, rotated = (quantized(folder, tmp_path / str(turn), rotate=turn, **options)[1] for turn in (False, True))
    assert kl(base, logits(rotated)) < 0.6 * kl(base, logits(plain))


def test_a_family_that_cannot_be_rotated_is_refused_by_name(tmp_path):
    config = {"model_type": "olmo2", "hidden_act": "silu", "pad_token_id": 0}
    folder = folder_of(tmp_path / "model", config)
    with pytest.raises(ConfigError, match=r"^model cannot be rotated: layers.0.mixer_sum \(add\) reads hidden states"):
        QuantizeJob(folder, Recipe(method="rtn", group_size=32, rotate=True), TEXTS, tmp_path / "out")
