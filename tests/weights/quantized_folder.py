"""Tiny models whose layers are stored as a format of quantized weights has them, and what every test asks of them."""

import json

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from small_checkpoint import described, write

from ridgeline import LLM, SamplingParams, quant
from ridgeline.core.dtypes import BFLOAT16, FLOAT8_E4M3, FLOAT32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights, prequantized

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
PHI3 = LLAMA | {"model_type": "phi3", "pad_token_id": 0}
EXAMPLE = "model.layers.1.mlp.down_proj"
LAYERS = {"self_attn.q_proj": "attn.q", "self_attn.o_proj": "attn.o", "mlp.down_proj": "ffn.down"}


def store(folder, settings, quantize, config=LLAMA, *, what="_proj.weight", metadata=None):
    """Writes a model; `quantize(layer, weight)` returns the tensors of each projection, or of `what`, and its numbers.

    Returns these by the layer's name.
    """
    write(folder, config)
    tensors, expected = load(folder), {}
    for name in [name for name in tensors if name.endswith(what)]:
        layer = name.removesuffix(".weight")
        stored, expected[layer] = quantize(layer, tensors.pop(name) / 16)
        tensors |= {key: np.ascontiguousarray(value) for key, value in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return expected


def as_stored(tensor):
    """A torch tensor as numpy has it, of the types of ml_dtypes where numpy has none."""
    same = {torch.bfloat16: (torch.int16, BFLOAT16), torch.float8_e4m3fn: (torch.uint8, FLOAT8_E4M3)}
    if tensor.dtype not in same:
        return tensor.numpy()
    integers, dtype = same[tensor.dtype]
    return tensor.view(integers).numpy().view(dtype)


def load(folder):
    return {name: as_stored(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


def change(folder, name, make):
    """Passes one tensor through `make`; None takes it away."""
    tensors = load(folder)
    tensors |= {name: make(tensors.pop(name))}
    kept = {key: np.ascontiguousarray(value) for key, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def check_bits(folder, expected, form=None):
    """The numbers of the layers, however they are read, are `expected` bit for bit; returns how they are stored."""
    spec, program = described(LLAMA)
    weights, stored = (
        load_weights(folder, spec, program, FLOAT32),
        prequantized(ModelFolder.open(folder), spec, program),
    )
    for layer in (0, 1):
        for source, name in LAYERS.items():
            name, matrix = f"layers.{layer}.{name}.weight", expected[f"model.layers.{layer}.{source}"]
            np.testing.assert_array_equal(weights[name], matrix, err_msg=name)
            np.testing.assert_array_equal(quant.dequantize(stored.matrix(name)), matrix, err_msg=name)
            np.testing.assert_array_equal(quant.dequantize(stored.matrix(name, part=slice(5, 27))), matrix[5:27])
    assert "embed.weight" not in stored.formats and len(stored.formats) == 14
    return stored.formats["layers.1.ffn.down.weight"]


def check_logits(folder, *, stays, inputs="int16", atol=1e-3):
    """Native and reference backend agree on tokens and log-probabilities; `stays`: native multiplies what is stored.

    16-bit inputs lose next to nothing.
    """
    completions, choices = {}, {}
    for backend in ("native", "reference"):
        bits = inputs if stays else "auto"
        llm = LLM(str(folder), backend=backend, dtype="float32", quantize_inputs=bits, num_threads=1)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
        completions[backend] = llm.generate([[1, 5, 9, 20]], params, use_tqdm=False)[0].outputs[0]
        choices[backend] = llm.engine.info.choices["quantize"]
    assert completions["native"].token_ids == completions["reference"].token_ids
    found, expected = (
        torch.tensor([x.logprob for x in completions[name].logprobs]) for name in ("native", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    assert choices["native"].value == ("as stored" if stays else "none")
    return choices["native"].reason


def loads_or_refuses(folder, config=LLAMA):
    """Tells whether a folder loads; a refusal is one error of the two kinds that name what is wrong."""
    spec, program = described(config)
    try:
        weights = load_weights(folder, spec, program, FLOAT32)
        assert {name: weight.shape for name, weight in weights.items()} == program.weights
        stored = prequantized(ModelFolder.open(folder), spec, program)
        for name in stored.formats if stored is not None else ():
            stored.matrix(name)
    except (ModelLoadError, ConfigError) as error:
        assert str(error)
        return False
    return True
