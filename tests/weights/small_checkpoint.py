"""A small random checkpoint on disk, made without transformers: what the weight tests read, break and mend."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch_weights import save_weights

from ridgeline.program.lower import lower
from ridgeline.program.op import Program
from ridgeline.spec import families
from ridgeline.spec.spec import DecoderSpec

LLAMA = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}
PHI3 = LLAMA | {"model_type": "phi3"}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 11,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "eos_token_id": 2,
}


def described(config: dict[str, object]) -> tuple[DecoderSpec, Program]:
    spec = families.read_spec(config)
    return spec, lower(spec)


def write(folder: Path, config: dict[str, object], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Writes config.json and model.safetensors; returns the program weights, in fp32."""
    spec, program = described(config)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in program.weights.items()}
    save_weights(folder, spec, weights, dtype)
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def rewrite(folder: Path, change) -> None:
    """Passes the tensors of model.safetensors, by their names on disk, through `change`."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Splits model.safetensors into two shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for number, members in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in members}, folder / file)
        weight_map |= dict.fromkeys(members, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
