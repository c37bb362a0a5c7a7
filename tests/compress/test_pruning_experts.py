"""Pruning mixtures: what stays computes as the whole model does where the router cannot choose what is gone."""

import pytest
import torch
from safetensors.numpy import load_file
from test_pruning import IDS, SIZES, TEXTS, folder_of, found_in, logits, random_weights
from transformers import AutoModelForCausalLM

from ridgeline.backends.reference.dense import DenseMemory, dense_inputs, dense_logits
from ridgeline.backends.reference.interpreter import interpret_each
from ridgeline.compress.calibrate import Loaded
from ridgeline.compress.prune import prune
from ridgeline.compress.pruning import Shape
from ridgeline.compress.recipe import PruneRecipe
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.save import publish

EXPERTS = 8
QWEN = SIZES | {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
OLMOE = {"model_type": "olmoe", "num_experts": EXPERTS, "num_experts_per_tok": 3, "norm_topk_prob": False}
CONFIGS = {
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen2_moe": QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "head_dim": 24},
    "qwen3_moe": QWEN | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "olmoe": {key: value for key, value in SIZES.items() if key != "head_dim"} | OLMOE,
}


def logits_without(config, weights, gone, ids_BT):
    """The whole model's logits with the router logits of the experts that are `gone`, of each layer, at -inf."""
    program, values = lower(read_spec(config)), dense_inputs(ids_BT)
    for op in interpret_each(program, weights, values, DenseMemory(program.states, *ids_BT.shape)):
        if op.label.endswith("ffn.router"):
            values[op.outputs[0]][:, gone[int(op.label.split(".")[1])]] = -torch.inf
    return values[program.result]


def without(experts):
    return [expert for expert in range(EXPERTS) if expert not in experts]


@pytest.mark.parametrize("num_experts", [1, 3, 5])
@pytest.mark.parametrize("family", CONFIGS)
def test_what_stays_computes_as_if_the_router_could_choose_nothing_else(family, num_experts):
    """Also where fewer experts stay than a token chose, and with layers that choose others."""
    config, weights = CONFIGS[family], random_weights(CONFIGS[family])
    spec, found = found_in(config, weights)
    whole = Shape.of(spec)
    shape = Shape(3, 96, num_experts, whole.kv_heads, whole.group, whole.head_dim)
    stays = found.retained(shape).ffn
    assert all(len(experts) == num_experts for experts in stays) and stays[0] != stays[1]
    pruned = found.pruned(shape, weights)
    assert {name: tuple(weight.shape) for name, weight in pruned.items()} == shape.program(config).weights
    with torch.inference_mode():
        after = dense_logits(shape.program(config), pruned, IDS).flatten(0, 1)
        before = logits_without(config, weights, [without(experts) for experts in stays], IDS)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_an_expert_is_as_important_as_what_it_adds(family):
    """Twice as important with twice its output; nothing without one, or where no token chooses it."""
    config, weights = CONFIGS[family], random_weights(CONFIGS[family])
    _, plain = found_in(config, weights)
    changed = {name: weight.clone() for name, weight in weights.items()}
    last = "layers.2.ffn"
    changed[f"{last}.down.weight"][3] *= 2
    changed[f"{last}.down.weight"][5] = 0
    spec, found = found_in(config, changed)
    expected_E = plain.ffn_LF[2].clone()
    expected_E[3] *= 2
    expected_E[5] = 0
    torch.testing.assert_close(found.ffn_LF[2], expected_E)
    torch.testing.assert_close(found.ffn_LF[:2], plain.ffn_LF[:2])
    shape = Shape.of(spec)
    assert 5 not in found.retained(Shape(3, 96, 7, shape.kv_heads, shape.group, shape.head_dim)).ffn[2]


def test_what_experts_count_for_is_part_of_what_they_add():
    """Against a token by token sum: of one layer, with the weights of the router."""
    config = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1}
    weights = random_weights(config)
    spec, found = found_in(config, weights)
    program, sums_E, num_tokens = lower(spec), torch.zeros(EXPERTS), 0
    for seed in range(2):
        ids_BT = torch.randint(4096, (4, 32), generator=torch.Generator().manual_seed(seed))
        values, kept = dense_inputs(ids_BT), {}
        for op in interpret_each(program, weights, values, DenseMemory(program.states, *ids_BT.shape)):
            kept |= {name: values[name] for name in op.outputs}
        (op,) = (op for op in program.ops if op.kind == "experts")
        x_TH, ids_TK, counts_TK = (kept[name] for name in op.inputs)
        gate, up, down = (weights[f"layers.0.ffn.{name}.weight"] for name in ("gate", "up", "down"))
        for x_H, experts, counts in zip(x_TH, ids_TK.tolist(), counts_TK.tolist(), strict=True):
            for expert, count in zip(experts, counts, strict=True):
                y_H = down[expert] @ (torch.nn.functional.silu(gate[expert] @ x_H) * (up[expert] @ x_H))
                sums_E[expert] += count * y_H.norm()
        num_tokens += len(x_TH)
    torch.testing.assert_close(found.ffn_LF[0], sums_E / num_tokens, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("axes", ["both", "width", "depth"])
def test_a_pruned_mixture_computes_the_same_in_transformers(tmp_path, family, axes):
    config = CONFIGS[family]
    folder = folder_of(tmp_path / "model", config)
    whole = lower(read_spec(config)).num_parameters
    recipe = PruneRecipe(params=int(0.88 * whole), axes=axes, samples=4, length=32, candidates=3)
    partial, shape, facts = prune(Loaded.open(folder.path), recipe, TEXTS, tmp_path / "out", lambda done, total: None)
    publish(partial, tmp_path / "out")
    pruned = ModelFolder.open(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert facts["candidates"][0]["price"] == sum(each.size for each in stored.values()) <= recipe.params
    assert facts["candidates"][0]["kl_bits"] > 0
    layers, experts = (shape.layers < 3, shape.ffn < EXPERTS)
    assert {"width": (False, True), "depth": (True, False)}.get(axes, (layers, experts)) == (layers, experts)
    read_spec(pruned.config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(theirs(IDS).logits[0], logits(pruned), atol=2e-4, rtol=2e-4)


def test_layers_without_experts_between_others_are_refused():
    with pytest.raises(ConfigError, match="layer 1 cannot be pruned: one has experts, another has none"):
        Shape.of(read_spec(CONFIGS["qwen3_moe"] | {"mlp_only_layers": [1]}))
