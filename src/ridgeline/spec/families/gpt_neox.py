"""GPT-NeoX (Pythia, Dolly): partial rotation, layers parallel or not, projections fused head by head."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, decoder, fused_renames, head_size, multi_head
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, LayerNorm, Mlp, ParallelLayer, Rename


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    bias = config.flag("attention_bias", True)
    config.ignore("classifier_dropout", "is_decoder")
    theta = config.number("rotary_emb_base", 10000.0, low=1.0)
    partial = config.number("rotary_pct", 0.25, low=0.0, high=1.0)
    rope = read_rope(config, head_size(hidden, heads), default_theta=theta, default_partial=partial)
    attention = multi_head(hidden, heads, rope=rope, qkv_bias=bias, out_bias=bias)
    mlp = Mlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu"))
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0))
    kind = ParallelLayer if config.flag("use_parallel_residual", True) else Layer
    return decoder(config, kind(attention, mlp, norm, norm), norm, positions=2048)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    outside = {"gpt_neox.embed_in": "embed", "gpt_neox.final_layer_norm": "final_norm", "embed_out": "head"}
    layer = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "ffn_norm",
        "attention.dense": "attn.o",
        "mlp.dense_h_to_4h": "ffn.up",
        "mlp.dense_4h_to_h": "ffn.down",
    }
    return fused_renames(spec, outside, "gpt_neox.layers.{i}", layer, "attention.query_key_value")
