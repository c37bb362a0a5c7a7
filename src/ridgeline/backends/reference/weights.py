"""A model's weights as this backend computes with them: all read at the start, quantized ones as what integers mean."""

from ridgeline.backends.base import ModelSource
from ridgeline.backends.host import DtypeName
from ridgeline.core.config import QuantizeConfig
from ridgeline.core.dtypes import DTYPES, Array
from ridgeline.quant import chosen_format, dequantized_weights
from ridgeline.weights.load import load_weights
from ridgeline.weights.lora import stacked


def read_weights(model: ModelSource, dtype: DtypeName, quantize: QuantizeConfig) -> dict[str, Array]:
    """Return the weights of `model.program` by name, its adapters included.

    Quantized weights are computed with in float32 as the native backend would without rounding the layers' inputs.
    Raises ModelLoadError for broken files.
    """
    weights = load_weights(model.folder, model.spec, model.base, DTYPES[dtype])
    weights |= stacked(model.adapters, DTYPES[dtype])
    if quantize.scheme is None:
        return weights
    form = chosen_format(quantize)
    return dequantized_weights(model.program, weights, quantize.scheme, form, embeddings=quantize.embeddings)
