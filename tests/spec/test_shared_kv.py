"""Layers that attend to the keys and values of another: which may, and what it spares."""

from dataclasses import replace

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.program.ops.attention import AttentionAttrs
from ridgeline.spec import families
from ridgeline.spec.spec import GroupedQueryAttention, LayerNorm, RmsNorm

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}


def with_mixers(**changes):
    """The spec of CONFIG; `changes` of the mixers by layer, as layer_<number>."""
    spec = families.read_spec(CONFIG)
    layers = list(spec.layers)
    for name, change in changes.items():
        number = int(name.removeprefix("layer_"))
        layers[number] = replace(layers[number], mixer=replace(layers[number].mixer, **change))
    return replace(spec, layers=tuple(layers))


def test_any_family_can_share():
    program = lower(with_mixers(layer_1={"kv_from": 0}, layer_3={"kv_from": 0}))
    assert [op.attrs.state for op in program.ops if isinstance(op.attrs, AttentionAttrs)] == [0, 0, 1, 0]
    assert len(program.states) == 2
    own = {name.split(".")[1] for name in program.weights if name.endswith(("attn.k.weight", "attn.v.weight"))}
    assert own == {"0", "2"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_1": {"kv_from": 1}}, "layer 1 reads the keys and values of layer 1"),
        ({"layer_1": {"kv_from": 2}}, "an earlier layer"),
        ({"layer_1": {"kv_from": -1}}, "an earlier layer"),
        ({"layer_1": {"kv_from": 0}, "layer_2": {"kv_from": 1}}, "of its own"),
        ({"layer_1": {"kv_from": 0, "window": 8}}, "windows must be equal"),
        ({"layer_1": {"kv_from": 0, "num_kv_heads": 4}}, "heads, sizes and windows must be equal"),
        ({"layer_0": {"head_dim": 16}, "layer_1": {"kv_from": 0}}, "16 entries"),
    ],
)
def test_a_layer_that_cannot_be_read_is_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        with_mixers(**changes)


@pytest.mark.parametrize("norm", [RmsNorm(1e-6, unit_offset=True), LayerNorm(1e-6)])
def test_rotated_heads_have_a_plain_norm(norm):
    with pytest.raises(ConfigError, match="plain RMSNorm"):
        GroupedQueryAttention(4, 2, 8, 1.0, qk_norm=norm, qk_norm_over="rotated head")
