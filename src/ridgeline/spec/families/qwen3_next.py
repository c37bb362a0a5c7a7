"""Qwen 3 Next: gated delta nets, every fourth layer gated attention, and experts with a gated shared one."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import (
    ACTIVATIONS,
    MAX_EXPERTS,
    expert_renames,
    llama_renames,
    read_attention,
    read_rope,
    read_sparse_layers,
)
from ridgeline.spec.common_recurrent import read_attending
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import (
    DecoderSpec,
    GatedDeltaNet,
    GatedMlp,
    GroupedQueryAttention,
    Head,
    Layer,
    MixtureOfExperts,
    Rename,
    RmsNorm,
    Routing,
)
from ridgeline.spec.tiny import Choose, tiny_by_layer, tiny_heads, tiny_sizes, tiny_sparse_layers


def read(config: ConfigReader) -> DecoderSpec:
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6, low=0.0), unit_offset=True)
    activation = config.choice("hidden_act", ACTIVATIONS, "silu")
    head_dim, bias = config.integer("head_dim", 256, high=1024), config.flag("attention_bias", False)
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_partial=0.25), bias=bias),
        num_kv_heads=config.integer("num_key_value_heads"),
        qk_norm=norm,
        output_gate=True,
    )
    delta = GatedDeltaNet(
        num_key_heads=config.integer("linear_num_key_heads", 16),
        num_value_heads=config.integer("linear_num_value_heads", 32),
        key_dim=config.integer("linear_key_head_dim", 128, high=1024),
        value_dim=config.integer("linear_value_head_dim", 128, high=1024),
        conv_taps=config.integer("linear_conv_kernel_dim", 4, high=64),
        activation=activation,
        norm_eps=norm.eps,
    )
    dense = GatedMlp(config.integer("intermediate_size", 5632), activation)
    experts = MixtureOfExperts(
        num_experts=config.integer("num_experts", 512, high=MAX_EXPERTS),
        size=config.integer("moe_intermediate_size", 512),
        activation=activation,
        routing=Routing(config.integer("num_experts_per_tok", 10), normalize=config.flag("norm_topk_prob", True)),
        shared=GatedMlp(config.integer("shared_expert_intermediate_size", 512), activation),
        shared_gate=True,
    )
    interval = config.integer("full_attention_interval", 4)
    attends = read_attending(config, lambda index: (index + 1) % interval == 0)
    layers = zip(attends, read_sparse_layers(config), strict=True)
    return DecoderSpec(
        model_type="qwen3_next",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_positions=config.integer("max_position_embeddings"),
        layers=tuple(
            Layer(attention if attends else delta, experts if sparse else dense, norm, norm)
            for attends, sparse in layers
        ),
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", False)),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    mixers = [layer.mixer for layer in spec.layers]
    heads = next((mixer.num_heads for mixer in mixers if isinstance(mixer, GroupedQueryAttention)), 1)
    key_heads = next((mixer.num_key_heads for mixer in mixers if isinstance(mixer, GatedDeltaNet)), 1)
    source, to, attn = "model.layers.{i}.linear_attn", "layers.{i}.delta", "layers.{i}.attn"

    def delta(*names: str) -> tuple[str, ...]:
        return tuple(f"{to}.{name}.weight" for name in names)

    q = "model.layers.{i}.self_attn.q_proj"
    gated = [Rename(f"{q}.{x}", (f"{attn}.q.{x}", f"{attn}.gate.{x}"), groups=heads) for x in ("weight", "bias")]
    return [
        *llama_renames(*gated),
        *expert_renames(),
        Rename(f"{source}.in_proj_qkvz.weight", delta("q", "k", "v", "z"), groups=key_heads),
        Rename(f"{source}.in_proj_ba.weight", delta("b", "a"), groups=key_heads),
        Rename(f"{source}.conv1d.weight", delta("conv_q", "conv_k", "conv_v"), depthwise=True),
        Rename(f"{source}.norm.weight", delta("norm")),
        Rename(f"{source}.out_proj.weight", delta("out")),
        Rename(f"{source}.A_log", (f"{to}.A_log",)),
        Rename(f"{source}.dt_bias", (f"{to}.dt_bias",)),
        Rename("mtp.", ()),  # layers that guess further tokens
    ]


def tiny(choose: Choose) -> dict[str, object]:
    heads, kv_heads, _ = tiny_heads(choose)
    sizes = tiny_sizes(choose)
    num_experts, key_heads = choose(2, 5), choose(1, 2)
    types = tiny_by_layer(choose, sizes, "linear_attention", "linear_attention", "full_attention")
    return {
        "model_type": "qwen3_next",
        "hidden_size": choose(32, 54),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": choose(8, 32),  # a quarter of it is rotated
        "attention_bias": choose(False, True),
        "rope_theta": choose(10000.0, 500000.0),
        "layer_types": choose(types, None),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * choose(1, 2, 3),
        "linear_key_head_dim": choose(8, 16),
        "linear_value_head_dim": choose(8, 12),
        "linear_conv_kernel_dim": choose(2, 4),
        "num_experts": num_experts,
        "num_experts_per_tok": choose(1, 2),
        "moe_intermediate_size": choose(12, 40),
        "shared_expert_intermediate_size": choose(20, 56),
        "norm_topk_prob": choose(False, True),
        **tiny_sparse_layers(choose, sizes),
        **sizes,
        "rms_norm_eps": choose(1e-4, 1e-3),  # a head that answers next to nothing is normalised: noise, in small heads
    }
