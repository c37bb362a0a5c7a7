"""Phi 1, 1.5 and 2: parallel layers with one norm, partial rotation, and a bias wherever there can be one."""

from ridgeline.spec.common import ACTIVATIONS, even_head_dim, layer_renames, llama_renames, module_renames, read_llama
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Head, LayerNorm, Mlp, ParallelLayer, Renames


def read(config: ConfigReader) -> DecoderSpec:
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5, low=0.0))
    return read_llama(
        config,
        norm,
        head_dim=even_head_dim(config),
        partial=0.5,
        bias=True,
        qk_norm=norm if config.flag("qk_layernorm", False) else None,
        ffn=Mlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu_new")),
        layer=ParallelLayer,
        positions=2048,
        head=Head(tied=False, bias=True),
    )


def renames(spec: DecoderSpec) -> Renames:
    layer = {f"self_attn.{letter}_layernorm": f"attn.{letter}_norm" for letter in "qk"}
    layer |= {"self_attn.dense": "attn.o", "mlp.fc1": "ffn.up", "mlp.fc2": "ffn.down"}
    return llama_renames(*module_renames({"model.final_layernorm": "final_norm"}), *layer_renames(layer))
