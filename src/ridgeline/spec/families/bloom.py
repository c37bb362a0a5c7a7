"""BLOOM: ALiBi instead of positions, a norm behind the embedding, queries, keys and values fused head by head."""

from ridgeline.spec.common import TIED, alibi_slopes, decoder, fused_renames, multi_head
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, Layer, LayerNorm, Mlp, Renames


def read(config: ConfigReader) -> DecoderSpec:
    config.spell(hidden_size="n_embed", num_attention_heads="n_head", num_hidden_layers="n_layer")
    config.spell(max_position_embeddings="seq_length")  # as trained; nothing ends there
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.expect("apply_residual_connection_post_layernorm", False)
    config.expect("n_inner", None, 4 * hidden)
    config.ignore("slow_but_exact")  # the order of sums that were split over devices in training
    config.ignore("attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion")
    config.ignore("skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "unk_token_id")
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5, low=0.0))
    attention = multi_head(config, alibi=alibi_slopes(heads), qkv_bias=True, out_bias=True)
    layer = Layer(attention, Mlp(4 * hidden, "gelu_tanh", bias=True), norm, norm)
    return decoder(config, layer, norm, positions=2048, head=TIED, embedding=Embedding(norm=norm))


def renames(spec: DecoderSpec, norm: str = "input_layernorm", ffn_norm: str = "post_attention_layernorm") -> Renames:
    outside = {"transformer.word_embeddings": "embed", "transformer.word_embeddings_layernorm": "embed_norm"}
    outside |= {"transformer.ln_f": "final_norm", "lm_head": "head"}
    layer = {norm: "mixer_norm", ffn_norm: "ffn_norm", "self_attention.dense": "attn.o"}
    layer |= {"mlp.dense_h_to_4h": "ffn.up", "mlp.dense_4h_to_h": "ffn.down"}
    return fused_renames(spec, outside, "transformer.h.{i}", layer, "self_attention.query_key_value")
