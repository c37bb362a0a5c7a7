"""MiniMax-Text-01: lightning attention, softmax attention in between, experts, scaled residuals (arXiv 2501.08313)."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_EXPERTS,
    expert_renames,
    llama_renames,
    read_attention,
    read_head_dim,
    read_rope,
)
from ridgeline.spec.common_recurrent import read_attending
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import (
    DecoderSpec,
    Head,
    LightningAttention,
    MixtureOfExperts,
    NormedResidualLayer,
    Rename,
    RmsNorm,
    Routing,
)
from ridgeline.spec.tiny import Choose, tiny_by_layer, tiny_heads, tiny_sizes

OUTPUT_NORM = RmsNorm(1e-6)  # of lightning attention, whatever rms_norm_eps is


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore("block_size", "router_jitter_noise")  # how long a chunk is; training only
    heads, head_dim = config.integer("num_attention_heads"), read_head_dim(config)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5, low=0.0))
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_theta=1e6)),
        num_kv_heads=config.optional_integer("num_key_value_heads", 8) or heads,
        window=config.optional_integer("sliding_window"),
    )
    experts = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", 8, high=MAX_EXPERTS),
        size=config.integer("intermediate_size"),
        activation=activation,
        routing=Routing(config.integer("num_experts_per_tok", 2)),
    )
    full, linear, ffn = (_factors(config, kind) for kind in ("full_attn", "linear_attn", "mlp"))
    attends = read_attending(config, lambda index: index % 2 == 0)  # every other one from the first

    def layer(index: int) -> NormedResidualLayer:
        lightning = LightningAttention(head_dim, _rates(heads, index, len(attends)), activation, OUTPUT_NORM)
        mixer, factors = (attention, full) if attends[index] else (lightning, linear)
        return NormedResidualLayer(mixer, experts, norm, norm, factors, ffn)

    return DecoderSpec(
        model_type="minimax",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=tuple(layer(index) for index in range(len(attends))),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def _factors(config: ConfigReader, kind: str) -> tuple[float, float]:
    """Of the residual and of what is added to it."""
    return config.number(f"{kind}_alpha_factor", 1.0), config.number(f"{kind}_beta_factor", 1.0)


def _rates(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """How fast each head forgets: powers of 2^(-8 / heads), slower from layer to layer."""
    slower = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(2.0 ** (-8 * (head + 1) / num_heads) * slower for head in range(num_heads))


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    mixers = (layer.mixer for layer in spec.layers)
    heads = next((mixer.num_heads for mixer in mixers if isinstance(mixer, LightningAttention)), 1)
    source, to = "model.layers.{i}.self_attn", "layers.{i}.lightning"
    tables = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # computed from the layer's number
    return [
        *llama_renames(),
        *expert_renames("block_sparse_moe", gate="w1", up="w3", down="w2"),
        Rename(f"{source}.qkv_proj.weight", tuple(f"{to}.{name}.weight" for name in "qkv"), groups=heads),
        Rename(f"{source}.norm.weight", (f"{to}.norm.weight",)),
        Rename(f"{source}.output_gate.weight", (f"{to}.gate.weight",)),
        Rename(f"{source}.out_proj.weight", (f"{to}.out.weight",)),
        *(Rename(f"{source}.{name}", ()) for name in tables),
    ]


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, _ = tiny_heads(choose)
    sizes = tiny_sizes(choose)
    types = tiny_by_layer(choose, sizes, "linear_attention", "linear_attention", "full_attention")
    factors = {
        f"{kind}_{name}_factor": choose(1, 0.5, 3.5)
        for kind in ("full_attn", "linear_attn", "mlp")
        for name in ("alpha", "beta")
    }
    return {
        "model_type": "minimax",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": choose(8, 20),
        "rope_theta": choose(10000.0, 500000.0),
        "layer_types": choose(types, None),
        "block_size": choose(4, 16),
        "num_local_experts": choose(2, 5),
        "num_experts_per_tok": choose(1, 2),
        **factors,
        **sizes,
    }
