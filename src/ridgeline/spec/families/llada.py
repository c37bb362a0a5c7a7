"""LLaDA: a Llama that fills in masks instead of continuing text; a token sees the whole prompt and its own block."""

from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.spec import common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, GatedMlp, Layer, MaskedDiffusion, Renames, Rope

TRAINING_ONLY = (
    *("attention_dropout", "embedding_dropout", "residual_dropout", "precision", "init_cutoff_factor", "init_device"),
    *("init_fn", "init_std", "flash_attention", "rope_full_precision", "layer_norm_with_affine", "block_group_size"),
    *("include_bias", "mlp_ratio", "attention_layer_norm_with_affine"),
)


def read(config: ConfigReader) -> DecoderSpec:
    _expect_llama_blocks(config)
    config.spell(hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers")
    config.spell(max_position_embeddings="max_sequence_length", tie_word_embeddings="weight_tying")
    norm = common.rms_norm(config, 1e-5)
    attention = common.multi_head(
        config,
        num_kv_heads=config.optional_integer("n_kv_heads") or config.integer("num_attention_heads"),
        rope=Rope(config.number("rope_theta", 10000.0, low=1.0), common.even_head_dim(config)),
        qkv_bias=config.flag("include_qkv_bias", False),
    )
    mlp = GatedMlp(config.integer("mlp_hidden_size"), config.choice("activation_type", common.ACTIVATIONS, "silu"))
    vocab_size = config.integer("vocab_size")
    embedding_size = config.optional_integer("embedding_size") or vocab_size
    mask_id = config.integer("mask_token_id", low=0)
    if mask_id >= embedding_size:
        raise ConfigError(f"config.json: mask_token_id {mask_id} is outside the {embedding_size} rows of the embedding")
    spec = common.decoder(config, Layer(attention, mlp, norm, norm), norm)
    return replace(spec, vocab_size=embedding_size, diffusion=MaskedDiffusion(mask_id))


def _expect_llama_blocks(config: ConfigReader) -> None:
    """Refuse the kinds of blocks that LLaDA's code can compute and its models do not use."""
    config.ignore(*TRAINING_ONLY)
    config.expect("block_type", "llama")
    config.expect("layer_norm_type", "rms")
    config.expect("rope", True)
    for key in ("alibi", "attention_layer_norm", "bias_for_layer_norm", "input_emb_norm", "scale_logits"):
        config.expect(key, False, None)
    config.expect("multi_query_attention", None, False)


def renames(spec: DecoderSpec) -> Renames:
    at, names = "model.transformer", {"wte": "embed", "ln_f": "final_norm", "ff_out": "head"}
    layer = {"attn_norm": "mixer_norm", "ff_norm": "ffn_norm", "attn_out": "attn.o"}
    layer |= {f"{letter}_proj": f"attn.{letter}" for letter in "qkv"}
    layer |= {"ff_proj": "ffn.gate", "up_proj": "ffn.up", "ff_out": "ffn.down"}
    outside = common.module_renames({f"{at}.{source}": to for source, to in names.items()})
    return [*outside, *common.layer_renames(layer, at + ".blocks.{i}")]
