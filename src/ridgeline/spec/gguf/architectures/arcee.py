"""Arcee's AFM."""

from collections.abc import Sequence

from ridgeline.spec.gguf.common import Shapes, Stored, paired_tensors, read_common
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "arcee",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        **read_common(metadata, shapes, paired=True),
    }


def tensors(spec: DecoderSpec) -> Sequence[Stored]:
    return paired_tensors(spec)
