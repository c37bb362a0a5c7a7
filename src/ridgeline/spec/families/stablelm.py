"""StableLM 2 and 3B: Llama with LayerNorm and partial rotation, where configured parallel, with norms of every head."""

from ridgeline.spec.common import even_head_dim, layer_renames, llama_renames, pre_norms, read_llama
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, LayerNorm, ParallelLayer, Renames


def read(config: ConfigReader) -> DecoderSpec:
    eps = config.number("layer_norm_eps", 1e-5, low=0.0)
    return read_llama(
        config,
        LayerNorm(eps),
        head_dim=even_head_dim(config),
        partial=0.25,
        qk_norm=LayerNorm(eps, bias=False, per_head=True) if config.flag("qk_layernorm", False) else None,
        qkv_bias=config.flag("use_qkv_bias", False),
        layer=ParallelLayer if config.flag("use_parallel_residual", False) else pre_norms,
        positions=4096,
    )


def renames(spec: DecoderSpec) -> Renames:
    norms = {f"self_attn.{letter}_layernorm.norms.{{e}}": f"attn.{letter}_norm" for letter in "qk"}
    return llama_renames(*layer_renames(norms))
