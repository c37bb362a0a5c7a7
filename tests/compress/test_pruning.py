"""Pruning: what stays is what a model without those rows computes, what matters least goes first, budgets hold."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from ridgeline.backends.reference.dense import dense_logits
from ridgeline.backends.reference.tensors import as_arrays, as_tensors
from ridgeline.compress.calibrate import Loaded
from ridgeline.compress.prune import budget_of, prune
from ridgeline.compress.pruning import Importance, Retained, Shape, candidates, importance
from ridgeline.compress.recipe import PruneRecipe
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.quality.texts import Texts
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights
from ridgeline.weights.save import publish, save_weights

TEXTS = Texts("here", {f"{i}.py": f"def f{i}(x):\n    return [x * {i} for _ in range({i})]\n" * 9 for i in range(12)})
WIDTH = 16  # of a head
SIZES = {
    "vocab_size": 4096, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    "hidden_act": "silu", "head_dim": WIDTH,
}  # fmt: skip
CONFIGS = {
    "llama": SIZES | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen3": SIZES | {"model_type": "qwen3", "tie_word_embeddings": False, "layer_types": ["full_attention"] * 3},
}
IDS = torch.arange(40)[None] * 37 % 4096
RETAINED = Retained(
    layers=[0, 2],
    hidden=[*range(5, 40), *range(50, 79)],
    ffn=[[*range(0, 64, 2)], [*range(40, 72)]],
    keys=[[1], [0]],
    queries=[[2], [1]],
)


def only(parts, size):
    """Scores by which exactly these parts are the most important."""
    scores = torch.zeros(size)
    scores[parts] = 1
    return scores


def random_weights(config):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) > 1
        else torch.rand(shape, generator=generator) + 0.5
        for name, shape in lower(read_spec(config)).weights.items()
    }


def folder_of(path, config, weights=None):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for file in ModelFolder.open("python-1m").path.glob("tokenizer*"):
        shutil.copyfile(file, path / file.name)
    save_weights(path, read_spec(config), as_arrays(weights or random_weights(config)), FLOAT32)
    return ModelFolder.open(path)


def logits(folder):
    spec = read_spec(folder.config)
    weights = as_tensors(load_weights(folder, spec, lower(spec), FLOAT32))
    with torch.inference_mode():
        return dense_logits(lower(spec), weights, IDS)[0]


def entries(heads):
    return [head * WIDTH + entry for head in heads for entry in range(WIDTH)]


def planted(config):
    """Random weights in which the last layer, neurons 7, a key-value head and 32 channels bring nothing."""
    weights = random_weights(config)
    for name, weight in weights.items():
        if name.endswith((".attn.o.weight", ".ffn.down.weight")):
            weight[64:] = 0  # channels
        if name.endswith((".attn.o.bias", ".ffn.down.bias")):
            weight[64:] = 0
        if name.startswith("layers.2.") and (".attn.o." in name or ".ffn.down." in name):
            weight[:] = 0
        if name.endswith(("ffn.gate.weight", "ffn.gate.bias")):
            weight[64:] = 0  # neurons
        if name.endswith(("attn.v.weight", "attn.v.bias")):
            weight[:WIDTH] = 0  # the first key-value head
    weights["embed.weight"][:, 64:] = 0
    return weights


def found_in(config, weights):
    spec = read_spec(config)
    batches = [torch.randint(4096, (4, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    return spec, importance(spec, lower(spec), weights, batches)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_stays_has_the_rows_that_were_kept(family):
    config, weights = CONFIGS[family], random_weights(CONFIGS[family])
    squares = {name: torch.rand(96) + 0.1 for name in weights if name.endswith("_norm.weight") and "attn" not in name}
    found = Importance(
        layers_L=only(RETAINED.layers, 3),
        hidden_H=only(RETAINED.hidden, 96),
        ffn_LF=torch.stack([only(RETAINED.ffn[0], 96), torch.zeros(96), only(RETAINED.ffn[1], 96)]),
        heads_LKQ=torch.stack([only([2], 4), torch.zeros(4), only([1], 4)]).unflatten(1, (2, 2)),
        squares=squares,
    )
    shape = Shape(2, 64, 32, 1, 1, WIDTH)
    assert found.retained(shape) == RETAINED
    pruned = found.pruned(shape, weights)
    assert {name: tuple(weight.shape) for name, weight in pruned.items()} == shape.program(config).weights
    source = {name: weight.numpy() for name, weight in weights.items()}
    hidden = np.array(RETAINED.hidden)
    for new, (old, query, key) in enumerate(((0, 2, 1), (2, 1, 0))):  # query head 2 is the first of key head 1
        ffn = np.array(RETAINED.ffn[new])
        wanted = {
            "attn.q.weight": source[f"layers.{old}.attn.q.weight"][np.ix_(entries([query]), hidden)],
            "attn.k.weight": source[f"layers.{old}.attn.k.weight"][np.ix_(entries([key]), hidden)],
            "attn.v.weight": source[f"layers.{old}.attn.v.weight"][np.ix_(entries([key]), hidden)],
            "attn.o.weight": source[f"layers.{old}.attn.o.weight"][np.ix_(hidden, entries([query]))],
            "ffn.gate.weight": source[f"layers.{old}.ffn.gate.weight"][np.ix_(ffn, hidden)],
            "ffn.up.weight": source[f"layers.{old}.ffn.up.weight"][np.ix_(ffn, hidden)],
            "ffn.down.weight": source[f"layers.{old}.ffn.down.weight"][np.ix_(hidden, ffn)],
        }
        if family == "qwen3":
            wanted |= {"attn.q_norm.weight": source[f"layers.{old}.attn.q_norm.weight"]}
        else:
            wanted |= {"attn.q.bias": source[f"layers.{old}.attn.q.bias"][entries([query])]}
            wanted |= {"ffn.up.bias": source[f"layers.{old}.ffn.up.bias"][ffn]}
            wanted |= {"ffn.down.bias": source[f"layers.{old}.ffn.down.bias"][hidden]}
        for name, array in wanted.items():
            np.testing.assert_array_equal(pruned[f"layers.{new}.{name}"], array)
        name, square = f"layers.{old}.ffn_norm.weight", squares[f"layers.{old}.ffn_norm.weight"].numpy()
        factor = math.sqrt(square[hidden].mean() / square.mean())
        np.testing.assert_allclose(pruned[f"layers.{new}.ffn_norm.weight"], source[name][hidden] * factor, rtol=1e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_parts_that_bring_nothing_go_first_and_nothing_changes(family):
    config, weights = CONFIGS[family], planted(CONFIGS[family])
    spec, found = found_in(config, weights)
    shape = Shape(2, 64, 64, 1, 2, WIDTH)
    assert found.retained(shape) == Retained([0, 1], [*range(64)], [[*range(64)]] * 2, [[1]] * 2, [[2, 3]] * 2)
    with torch.inference_mode():
        whole = dense_logits(lower(spec), weights, IDS)
        after = dense_logits(shape.program(config), found.pruned(shape, weights), IDS)
    torch.testing.assert_close(after, whole, atol=1e-4, rtol=1e-4)


def test_all_that_is_kept_is_the_model_itself():
    config, weights = CONFIGS["llama"], random_weights(CONFIGS["llama"])
    spec, found = found_in(config, weights)
    pruned = found.pruned(Shape.of(spec), weights)
    assert pruned.keys() == weights.keys()
    assert all(torch.equal(pruned[name], weights[name]) for name in weights)
    assert found.lost(Shape.of(spec)) == pytest.approx(0, abs=1e-5)


def test_a_query_head_that_brings_nothing_goes_first_in_its_group():
    config, weights = CONFIGS["llama"], random_weights(CONFIGS["llama"])
    for layer in range(3):
        weights[f"layers.{layer}.attn.o.weight"][:, entries([0, 3])] = 0  # the first of group 0, the second of group 1
    _, found = found_in(config, weights)
    assert found.retained(Shape(3, 96, 96, 2, 1, WIDTH)).queries == [[1, 2]] * 3


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("axes", ["both", "width", "depth"])
def test_a_pruned_folder_computes_the_same_in_transformers(tmp_path, family, axes):
    folder = folder_of(tmp_path / "model", CONFIGS[family])
    most = 450_000 if family == "llama" else 880_000
    recipe = PruneRecipe(params=most, axes=axes, samples=4, length=32, candidates=3)
    model = Loaded.open(folder.path)
    partial, shape, facts = prune(model, recipe, TEXTS, tmp_path / "out", lambda done, total: None)
    publish(partial, tmp_path / "out")
    pruned = ModelFolder.open(tmp_path / "out")
    num_parameters = lower(read_spec(pruned.config)).num_parameters
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert facts["candidates"][0]["price"] == num_parameters == sum(each.size for each in stored.values())
    assert num_parameters <= most
    kl = [each["kl_bits"] for each in facts["candidates"]]
    assert kl == sorted(kl) and kl[0] > 0
    assert (shape.layers == 3) or axes != "width"
    assert (shape.hidden, shape.ffn) == (96, 96) or axes != "depth"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(theirs(IDS).logits[0], logits(pruned), atol=2e-4, rtol=2e-4)
    assert pruned.tokenizer() is not None


@pytest.mark.parametrize("share", [0.85, 0.6, 0.4])
@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-80"])
def test_a_latency_is_a_share_of_the_least_time_of_a_step(share, hardware):
    config = dict(CONFIGS["qwen3"], vocab_size=64)
    _, found = found_in(CONFIGS["qwen3"], random_weights(CONFIGS["qwen3"]))
    budget = budget_of(PruneRecipe(latency=share, hardware=hardware), lower(read_spec(config)))
    chosen = candidates(config, found, budget, "both", 4)
    assert 0 < len(chosen) <= 4
    for each in chosen:
        assert budget[1](each.shape.program(config)) == each.price <= budget[0]
    assert budget[0] == pytest.approx(share * budget[1](lower(read_spec(config))))


def test_shapes_are_within_the_budget_those_first_that_lose_least():
    config = CONFIGS["llama"]
    _, found = found_in(config, random_weights(config))
    whole = lower(read_spec(config)).num_parameters
    for share in (0.9, 0.7, 0.5, 0.3):
        chosen = candidates(config, found, (share * whole, lambda each: each.num_parameters), "both", 99)
        assert chosen
        assert all(each.price <= share * whole for each in chosen)
        assert len({(each.shape.layers, each.shape.hidden) for each in chosen}) == len(chosen)
        lost = [found.lost(each.shape) for each in chosen]
        assert lost == sorted(lost)


@pytest.mark.parametrize(
    ("recipe", "config", "message"),
    [
        ({"params": 1000}, {}, "a budget of 1,000 prunes nothing or cannot be met: it must be from"),
        ({"params": 9_000_000}, {}, "a budget of 9e.06 prunes nothing"),
        ({"params": 400_000, "axes": "depth"}, {}, "it must be from 4.*, the smallest shape of these axes"),
        ({"latency": 0.5, "hardware": "abacus"}, {}, "there is no datasheet of 'abacus'"),
        ({"params": 1_000_000}, {"model_type": "mistral"}, "model_type 'mistral' cannot be pruned"),
    ],
)
def test_what_cannot_be_pruned_is_told_and_nothing_is_written(tmp_path, recipe, config, message):
    sizes = {key: value for key, value in CONFIGS["llama"].items() if not key.endswith("_bias")}
    folder = folder_of(tmp_path / "model", sizes | config)
    with pytest.raises(ConfigError, match=message):
        model = Loaded.open(folder.path)
        prune(model, PruneRecipe(samples=2, length=16, **recipe), TEXTS, tmp_path / "out", lambda done, total: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_windows_are_refused(tmp_path):
    config = CONFIGS["qwen3"] | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    config.pop("layer_types")
    with pytest.raises(ConfigError, match="layer 1 cannot be pruned"):
        Shape.of(read_spec(config))


@pytest.mark.parametrize(
    "options",
    [{}, {"params": 1000, "latency": 0.5}, {"params": 0}, {"latency": 1.5}, {"params": 9, "axes": "depths"}],
)
def test_a_recipe_has_one_budget(options):
    with pytest.raises(ConfigError):
        PruneRecipe(**options)
