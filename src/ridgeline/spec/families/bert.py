"""BERT: an encoder with learned positions and norms behind each sum; every token sees the whole text."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, MAX_LAYERS, module_renames, multi_head
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Embedding, LayerNorm, Mlp, PostNormLayer, Rename

HEADS = ("cls.", "bert.pooler.", "pooler.", "classifier.", "qa_outputs.")  # tasks beside the encoder
BUFFERS = ("bert.embeddings.position_ids", "embeddings.position_ids")


def read(config: ConfigReader) -> DecoderSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    norm = LayerNorm(config.number("layer_norm_eps", 1e-12, low=0.0))
    attention = multi_head(hidden, heads, qkv_bias=True, out_bias=True)
    mlp = Mlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu"))
    config.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "gradient_checkpointing")
    config.ignore("add_cross_attention", "cross_attention_hidden_size", "directionality")
    for key in ("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"):
        config.ignore(key)
    config.ignore("pooler_type", "tie_word_embeddings")
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    positions = config.integer("max_position_embeddings", 512)
    return DecoderSpec(
        model_type="bert",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=positions,
        layers=(PostNormLayer(attention, mlp, norm, norm),) * config.integer("num_hidden_layers", high=MAX_LAYERS),
        final_norm=None,
        head=None,
        embedding=Embedding(num_positions=positions, num_types=config.integer("type_vocab_size", 2), norm=norm),
    )


def renames(spec: DecoderSpec) -> Sequence[Rename]:
    layer = "layers.{i}"
    names = {
        "embeddings.word_embeddings": "embed",
        "embeddings.position_embeddings": "positions",
        "embeddings.token_type_embeddings": "types",
        "embeddings.LayerNorm": "embed_norm",
        "encoder.layer.{i}.attention.self.query": f"{layer}.attn.q",
        "encoder.layer.{i}.attention.self.key": f"{layer}.attn.k",
        "encoder.layer.{i}.attention.self.value": f"{layer}.attn.v",
        "encoder.layer.{i}.attention.output.dense": f"{layer}.attn.o",
        "encoder.layer.{i}.attention.output.LayerNorm": f"{layer}.mixer_norm",
        "encoder.layer.{i}.intermediate.dense": f"{layer}.ffn.up",
        "encoder.layer.{i}.output.dense": f"{layer}.ffn.down",
        "encoder.layer.{i}.output.LayerNorm": f"{layer}.ffn_norm",
    }
    stored = module_renames({prefix + source: target for prefix in ("bert.", "") for source, target in names.items()})
    return [*stored, *(Rename(source, ()) for source in (*HEADS, *BUFFERS))]
