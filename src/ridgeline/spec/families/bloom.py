"""BLOOM: ALiBi instead of positions, a norm behind the embedding, queries, keys and values fused head by head."""

from collections.abc import Sequence

from ridgeline.spec.common import MAX_LAYERS, alibi_slopes, fused_renames, multi_head
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Head, Layer, LayerNorm, Mlp, Rename


def read(config: ConfigReader) -> DecoderSpec:
    hidden = config.integer(config.spelling("hidden_size", "n_embed"))
    heads = config.integer(config.spelling("num_attention_heads", "n_head"))
    config.expect("apply_residual_connection_post_layernorm", False)
    config.expect("n_inner", None, 4 * hidden)
    config.ignore(
        "slow_but_exact",  # the order of sums that were split over devices in training
        "attention_softmax_in_fp32",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "offset_alibi",
        "unk_token_id",
    )
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))
    attention = multi_head(hidden, heads, alibi=alibi_slopes(heads), qkv_bias=True, out_bias=True)
    layer = Layer(attention, Mlp(4 * hidden, "gelu_tanh", bias=True), norm, norm)
    num_layers = config.integer(config.spelling("num_hidden_layers", "n_layer"), high=MAX_LAYERS)
    return DecoderSpec(
        model_type="bloom",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=config.integer("seq_length", 2048),  # as trained; nothing ends there
        layers=(layer,) * num_layers,
        final_norm=norm,
        head=Head(tied=config.flag("tie_word_embeddings", True)),
        embedding=Embedding(norm=norm),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    outside = {
        "transformer.word_embeddings": "embed",
        "transformer.word_embeddings_layernorm": "embed_norm",
        "transformer.ln_f": "final_norm",
        "lm_head": "head",
    }
    layer = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attention.dense": "attn.o",
        "mlp.dense_h_to_4h": "ffn.up",
        "mlp.dense_4h_to_h": "ffn.down",
    }
    return fused_renames(spec, outside, "transformer.h.{i}", layer, "self_attention.query_key_value")
