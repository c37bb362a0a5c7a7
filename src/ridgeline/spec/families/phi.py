"""Phi 1, 1.5 and 2: parallel layers with one norm, partial rotation, and a bias wherever there can be one."""

from ridgeline.spec.common import (
    ACTIVATIONS,
    decoder,
    even_head_dim,
    layer_renames,
    llama_renames,
    module_renames,
    read_attention,
)
from ridgeline.spec.common_rope import read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, Mlp, ParallelLayer, Renames


def read(config: ConfigReader) -> DecoderSpec:
    head_dim = even_head_dim(config)
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0))
    qk_norm = norm if config.flag("qk_layernorm", False) else None
    rope = read_rope(config, head_dim, default_partial=0.5)
    attention = read_attention(config, head_dim, rope, bias=True, qk_norm=qk_norm)
    mlp = Mlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu_new"))
    return decoder(config, ParallelLayer(attention, mlp, norm), norm, positions=2048, head=Head(tied=False, bias=True))


def renames(spec: DecoderSpec) -> Renames:
    layer = {
        **{f"self_attn.{letter}_layernorm": f"attn.{letter}_norm" for letter in "qk"},
        "self_attn.dense": "attn.o",
        "mlp.fc1": "ffn.up",
        "mlp.fc2": "ffn.down",
    }
    return llama_renames(*module_renames({"model.final_layernorm": "final_norm"}), *layer_renames(layer))
