"""Jamba: Mamba in most layers, attention without positions in a few, experts in every other one (arXiv 2403.19887)."""

from ridgeline.spec import common
from ridgeline.spec.common_recurrent import NOT_COMPUTED, hybrid_renames, mamba_renames
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Layer, Mamba, MixtureOfExperts, Rename, Renames, RmsNorm, Routing


def read(config: ConfigReader) -> DecoderSpec:
    config.ignore(*NOT_COMPUTED, "num_logits_to_keep", "calc_logits_for_entire_prompt")
    config.expect("mamba_inner_layernorms", True)
    config.expect("sliding_window", None)
    norm = common.rms_norm(config)
    hidden, num_layers = config.integer("hidden_size"), config.integer("num_hidden_layers", high=common.MAX_LAYERS)
    heads = config.integer("num_attention_heads")
    kv_heads = config.optional_integer("num_key_value_heads", 8) or heads
    attention = common.multi_head(config, num_kv_heads=kv_heads)
    mamba = _mamba(config, hidden, norm)
    attends = _every(config, "attn_layer", 8, 4)
    size, activation = config.integer("intermediate_size"), config.choice("hidden_act", common.ACTIVATIONS, "silu")
    dense, experts = GatedMlp(size, activation), _experts(config, size)
    sparse = _every(config, "expert_layer", 2, 1)
    layers = [
        Layer(attention if i in attends else mamba, experts if experts and i in sparse else dense, norm, norm)
        for i in range(num_layers)
    ]
    return common.decoder(config, layers, norm, positions=262144)


def _every(config: ConfigReader, kind: str, period: int, offset: int) -> range:
    """Read which layers are of a kind: every `period`-th from `offset` on."""
    period = config.integer(f"{kind}_period", period)
    offset = config.integer(f"{kind}_offset", offset, low=0, high=period - 1)
    return range(offset, common.MAX_LAYERS, period)


def _mamba(config: ConfigReader, hidden: int, norm: RmsNorm) -> Mamba:
    return Mamba(
        inner_size=hidden * config.integer("mamba_expand", 2, high=64),
        state_size=config.integer("mamba_d_state", 16),
        dt_rank=config.integer_or_auto("mamba_dt_rank", -(-hidden // 16)),
        conv_taps=config.integer("mamba_d_conv", 4, high=64),
        activation=config.choice("hidden_act", common.ACTIVATIONS, "silu"),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        inner_norm=norm,
    )


def _experts(config: ConfigReader, size: int) -> MixtureOfExperts | None:
    """Read the experts; None where a layer has one expert, which is then an ordinary feed-forward."""
    count, top_k = config.integer("num_experts", 16, high=common.MAX_EXPERTS), config.integer("num_experts_per_tok", 2)
    if count == 1:
        return None
    activation = config.choice("hidden_act", common.ACTIVATIONS, "silu")
    return MixtureOfExperts(count, size, activation, Routing(top_k, normalize=False))


def renames(spec: DecoderSpec) -> Renames:
    return [
        *common.llama_renames(*hybrid_renames(), *mamba_renames("model.layers.{i}.mamba")),
        Rename("model.layers.{i}.feed_forward.router.weight", ("layers.{i}.ffn.router.weight",)),
        *common.expert_renames("feed_forward"),
    ]
