"""BERT: an encoder with learned positions and norms behind each sum; every token sees the whole text."""

from collections.abc import Sequence

from ridgeline.spec.common import ACTIVATIONS, decoder, layer_renames, module_renames, multi_head
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import Classifier, DecoderSpec, Embedding, LayerNorm, Mlp, PostNormLayer, Rename, Renames

HEADS = ("cls.", "lm_head.", "pooler.", "classifier.", "qa_outputs.")  # tasks beside the encoder
CLASSIFIER = Classifier(("LABEL_0",), "first", dense=True, bias=True)
BUFFERS = ("bert.embeddings.position_ids", "roberta.embeddings.position_ids", "embeddings.position_ids")
EMBEDDINGS = {"word_embeddings": "embed", "token_type_embeddings": "types", "LayerNorm": "embed_norm"}
LAYER = {
    **{f"attention.self.{word}": f"attn.{word[0]}" for word in ("query", "key", "value")},
    "attention.output.dense": "attn.o",
    "attention.output.LayerNorm": "mixer_norm",
    "intermediate.dense": "ffn.up",
    "output.dense": "ffn.down",
    "output.LayerNorm": "ffn_norm",
}


def read(config: ConfigReader) -> DecoderSpec:
    norm = LayerNorm(config.number("layer_norm_eps", 1e-12, low=0.0))
    attention = multi_head(config, qkv_bias=True, out_bias=True)
    mlp = Mlp(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu"))
    config.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "gradient_checkpointing")
    config.ignore("add_cross_attention", "cross_attention_hidden_size", "directionality", "tie_word_embeddings")
    config.ignore("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
    config.ignore("pooler_type")
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    positions = config.integer("max_position_embeddings", 512)
    embedding = Embedding(num_positions=positions, num_types=config.integer("type_vocab_size", 2), norm=norm)
    layer = PostNormLayer(attention, mlp, norm, norm)
    return decoder(config, layer, None, positions=positions, head=None, embedding=embedding)


def renames(spec: DecoderSpec) -> Renames:
    head = {"classifier": "classifier.out", "bert.pooler.dense": "classifier.dense"}
    return [*module_renames(head), *encoder_renames("bert.", ["positions"])]


def encoder_renames(base: str, positions: Sequence[str]) -> Renames:
    """Return the renames of an encoder by itself, or called `base` within a model; `positions` share a table."""
    names = [Rename(source, ()) for source in (*(f"{base}{head}" for head in HEADS), *HEADS, *BUFFERS)]
    for prefix in (base, ""):
        names += module_renames({f"{prefix}embeddings.position_embeddings": positions})
        names += module_renames({f"{prefix}embeddings.{source}": to for source, to in EMBEDDINGS.items()})
        names += layer_renames(LAYER, prefix + "encoder.layer.{i}")
    return names
