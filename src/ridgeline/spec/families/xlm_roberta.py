"""XLM-RoBERTa: BERT whose positions begin behind the padding token's id, with a head that has its own first layer."""

from dataclasses import replace

from ridgeline.spec.common import module_renames
from ridgeline.spec.families import bert
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec, Renames

CLASSIFIER = bert.CLASSIFIER


def read(config: ConfigReader) -> DecoderSpec:
    unused = config.integer("pad_token_id", 1, low=0) + 1
    positions = config.integer("max_position_embeddings", 512, low=unused + 1) - unused
    spec = bert.read(config)
    embedding = replace(spec.embedding, num_positions=positions, unused_positions=unused)
    return replace(spec, max_positions=positions, embedding=embedding)


def renames(spec: DecoderSpec) -> Renames:
    head = {"classifier.dense": "classifier.dense", "classifier.out_proj": "classifier.out"}
    return [*module_renames(head), *bert.encoder_renames("roberta.", ["unused_positions", "positions"])]
