"""MiniMax-Text-01: lightning attention, softmax attention in between, experts, scaled residuals (arXiv 2501.08313)."""

from ridgeline.spec import common
from ridgeline.spec.common_recurrent import read_attending
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.families.mixtral import read_experts
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, LightningAttention, NormedResidualLayer, Rename, Renames, RmsNorm

OUTPUT_NORM = RmsNorm(1e-6)  # of lightning attention, whatever rms_norm_eps is


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore("block_size", "router_jitter_noise")  # how long a chunk is; training only
    heads, head_dim = config.integer("num_attention_heads"), common.read_head_dim(config)
    activation = config.choice("hidden_act", common.ACTIVATIONS, "silu")
    norm = common.rms_norm(config, 1e-5)
    attention = common.read_attention(
        config,
        head_dim,
        read_rope(config, head_dim, default_theta=1e6),
        num_kv_heads=config.optional_integer("num_key_value_heads", 8) or heads,
        window=config.optional_integer("sliding_window"),
    )
    experts = read_experts(config)
    full, linear, ffn = (  # of the residual, and of what is added to it
        (config.number(f"{kind}_alpha_factor", 1.0), config.number(f"{kind}_beta_factor", 1.0))
        for kind in ("full_attn", "linear_attn", "mlp")
    )
    attends = read_attending(config, lambda index: index % 2 == 0)  # every other one from the first

    def layer(index: int) -> NormedResidualLayer:
        lightning = LightningAttention(head_dim, _rates(heads, index, len(attends)), activation, OUTPUT_NORM)
        mixer, factors = (attention, full) if attends[index] else (lightning, linear)
        return NormedResidualLayer(mixer, experts, norm, norm, factors, ffn)

    return common.decoder(config, [layer(index) for index in range(len(attends))], norm)


def _rates(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Compute how fast each head forgets: powers of 2^(-8 / heads), slower from layer to layer."""
    slower = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(2.0 ** (-8 * (head + 1) / num_heads) * slower for head in range(num_heads))


def renames(spec: DecoderSpec) -> Renames:
    mixers = (layer.mixer for layer in spec.layers)
    heads = next((mixer.num_heads for mixer in mixers if isinstance(mixer, LightningAttention)), 1)
    source = "model.layers.{i}.self_attn"
    lightning = {"norm": "lightning.norm", "output_gate": "lightning.gate", "out_proj": "lightning.out"}
    tables = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # computed from the layer's number
    return [
        *common.llama_renames(),
        *common.expert_renames("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *common.layer_renames({"qkv_proj": [f"lightning.{name}" for name in "qkv"]}, source, groups=heads),
        *common.layer_renames(lightning, source),
        *(Rename(f"{source}.{name}", ()) for name in tables),
    ]
