"""What the families with multi-head latent attention share: reading it, DeepSeek's layers, and their tensor names."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec.common import ACTIVATIONS, MAX_EXPERTS, MAX_LAYERS, expert_renames, llama_renames, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import (
    DecoderSpec,
    GatedMlp,
    Head,
    LatentAttention,
    Layer,
    MixtureOfExperts,
    Rename,
    RmsNorm,
    Rope,
    Routing,
    YarnRope,
)
from ridgeline.spec.tiny import Choose, tiny_rope, tiny_sizes

LATENT_NORM = RmsNorm(1e-6)  # whatever rms_norm_eps says
MAX_RANK = 1 << 14


def read_deepseek(config: ConfigReader, model_type: str, routing: Routing, *, interleaved: bool) -> DecoderSpec:
    """A DeepSeek model: latent attention, and experts beside shared ones behind the first few dense layers."""
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0))
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    expert_size = config.integer("moe_intermediate_size", 1407)
    dense = GatedMlp(config.integer("intermediate_size"), activation)
    experts = MixtureOfExperts(
        num_experts=config.integer("n_routed_experts", 64, high=MAX_EXPERTS),
        size=expert_size,
        activation=activation,
        routing=routing,
        shared=GatedMlp(expert_size * config.integer("n_shared_experts", 2, high=64), activation),
    )
    config.expect("moe_layer_freq", 1)
    config.expect("mlp_bias", False)
    config.ignore("ep_size", "aux_loss_alpha", "seq_aux")  # of training and of other engines
    attention = _read_attention(config, interleaved=interleaved)
    num_dense = config.integer("first_k_dense_replace", 0, low=0)
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return DecoderSpec(
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=tuple(Layer(attention, dense if i < num_dense else experts, norm, norm) for i in range(num_layers)),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def _read_attention(config: ConfigReader, *, interleaved: bool) -> LatentAttention:
    heads = config.integer("num_attention_heads", high=1 << 12)
    if config.integer("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"config.json: num_key_value_heads must be num_attention_heads ({heads}): every head has its own part of "
            "the latent"
        )
    nope, rope_dim = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    config.expect("head_dim", rope_dim, None)
    config.expect("qk_head_dim", nope + rope_dim, None)
    rope = replace(read_rope(config, rope_dim), interleaved=interleaved)
    return LatentAttention(
        num_heads=heads,
        kv_rank=config.integer("kv_lora_rank", 512, high=MAX_RANK),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim", 128),
        scale=(nope + rope_dim) ** -0.5 * _temperature(rope),
        rope=rope,
        norm=LATENT_NORM,
        q_rank=config.optional_integer("q_lora_rank", 1536, high=MAX_RANK),
        bias=config.flag("attention_bias", False),
    )


def _temperature(rope: Rope) -> float:
    """YaRN's on the logits, where the config gives its strength for all entries of a key, rotated or not."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnRope) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def deepseek_renames(spec: DecoderSpec) -> Sequence[Rename]:
    at, to = "model.layers.{i}.self_attn", "layers.{i}.attn"
    compressed = any(isinstance(layer.mixer, LatentAttention) and layer.mixer.q_rank for layer in spec.layers)
    names = {
        ("q_b_proj" if compressed else "q_proj"): "q",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_up",
        "q_a_layernorm": "q_norm",
    }
    attention = [Rename(f"{at}.{source}.weight", (f"{to}.{target}.weight",)) for source, target in names.items()]
    for source, target in (("q_a_proj", "q_down"), ("kv_a_proj_with_mqa", "kv_down")):
        attention += [Rename(f"{at}.{source}.{part}", (f"{to}.{target}.{part}",)) for part in ("weight", "bias")]
    return [*llama_renames(*attention), *expert_renames(shared="shared_experts")]


def tiny_deepseek(choose: Choose) -> dict[str, object]:
    """What the tiny configs of DeepSeek's models have in common; 12 or 24 experts in 1, 2, 3 or 4 groups."""
    heads, rope_dim = choose(1, 2, 3, 8), choose(4, 8, 16)
    sizes = tiny_sizes(choose)
    return {
        "hidden_size": choose(48, 96),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": choose(None, 24, 33),
        "kv_lora_rank": choose(16, 34, 64),
        "qk_nope_head_dim": choose(8, 20, 32),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": choose(8, 12, 32),
        "attention_bias": choose(False, True),
        "n_routed_experts": choose(12, 24),
        "n_shared_experts": choose(1, 2),
        "num_experts_per_tok": choose(1, 2, 3),
        "moe_intermediate_size": choose(12, 20),
        "first_k_dense_replace": choose(0, 1),
        "n_group": choose(1, 2, 3, 4),
        "topk_group": 1,
        "routed_scaling_factor": choose(1.0, 2.5),
        **sizes,
        **tiny_rope(choose, rope_dim),
    }
