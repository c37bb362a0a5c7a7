"""GPT-NeoX (Pythia, Dolly): partial rotation, layers parallel or not, projections fused head by head."""

from ridgeline.spec.common import ACTIVATIONS, decoder, even_head_dim, fused_renames, multi_head
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, LayerNorm, Mlp, ParallelLayer, Renames


def read(config: ConfigReader) -> DecoderSpec:
    bias = config.flag("attention_bias", True)
    config.ignore("classifier_dropout", "is_decoder")
    theta = config.number("rotary_emb_base", 10000.0, low=1.0)
    partial = config.number("rotary_pct", 0.25, low=0.0, high=1.0)
    rope = read_rope(config, even_head_dim(config), default_theta=theta, default_partial=partial)
    attention = multi_head(config, rope=rope, qkv_bias=bias, out_bias=bias)
    mlp = Mlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu"))
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0))
    kind = ParallelLayer if config.flag("use_parallel_residual", True) else Layer
    return decoder(config, kind(attention, mlp, norm, norm), norm, positions=2048)


def renames(spec: DecoderSpec) -> Renames:
    outside = {"gpt_neox.embed_in": "embed", "gpt_neox.final_layer_norm": "final_norm", "embed_out": "head"}
    layer = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "ffn_norm", "attention.dense": "attn.o"}
    layer |= {"mlp.dense_h_to_4h": "ffn.up", "mlp.dense_4h_to_h": "ffn.down"}
    return fused_renames(spec, outside, "gpt_neox.layers.{i}", layer, "attention.query_key_value")
