"""StableLM 2 and 3B: Llama with LayerNorm and partial rotation, where configured parallel, with norms of every head."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.spec.common import decoder, head_size, llama_renames, read_attention, read_gated_mlp, read_rope
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Layer, LayerNorm, ParallelLayer, Rename


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = head_size(hidden, heads)
    eps = config.number("layer_norm_eps", 1e-5, low=0.0)
    norm = LayerNorm(eps)
    attention = replace(
        read_attention(config, head_dim, read_rope(config, head_dim, default_partial=0.25)),
        qk_norm=LayerNorm(eps, bias=False, per_head=True) if config.flag("qk_layernorm", False) else None,
        qkv_bias=config.flag("use_qkv_bias", False),
    )
    mlp = read_gated_mlp(config)
    parallel = config.flag("use_parallel_residual", False)
    layer = ParallelLayer(attention, mlp, norm) if parallel else Layer(attention, mlp, norm, norm)
    return decoder(config, layer, norm, positions=4096)


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    prefix = "layers.{i}"
    return llama_renames(
        *(
            Rename(
                f"model.{prefix}.self_attn.{letter}_layernorm.norms.{{e}}.weight",
                (f"{prefix}.attn.{letter}_norm.weight",),
            )
            for letter in "qk"
        ),
    )
