"""Write a folder of random weights in GPTQ's 4 bits, of the shape of an 8B Llama, one layer at a time.

usage: python -m benchmarks.random_gptq FOLDER [--hidden 4096 --inner 14336 --layers 32 --heads 32 --kv-heads 8
                                        --vocab 128256 --group 128]

Speed, memory and the time of a start do not depend on what weights say: `python -m benchmarks.startup --model FOLDER
--repeats 1` measures the first start and the most memory that it takes, `benchmarks.decode_stream --formats FOLDER` and
`benchmarks.roof --formats FOLDER` steps. A layer is in memory, then the embedding, then the head.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BITS = 4
CODES = 32 // BITS  # in a word
Tensors = dict[str, np.ndarray]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    sizes = {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv-heads": 8, "vocab": 128256, "group": 128}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(arguments)


def config_of(options: argparse.Namespace) -> dict[str, object]:
    settings = {"quant_method": "gptq", "bits": BITS, "group_size": options.group, "sym": True, "desc_act": False}
    return {
        "model_type": "llama",
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": options.inner,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": settings,
    }


def packed(name: str, num_outputs: int, num_inputs: int, group: int, rng: np.random.Generator) -> Tensors:
    """A matrix in the layout of GPTQ, version 1: zeros of 8 are stored as 7."""
    num_groups = num_inputs // group
    words = rng.integers(-(1 << 31), 1 << 31, (num_inputs // CODES, num_outputs), dtype=np.int32)
    zeros = np.full((num_groups, num_outputs // CODES), 0x77777777, np.int32)
    scales = rng.uniform(0.5, 1.5, (num_groups, num_outputs)) / (4.6 * num_inputs**0.5)  # outputs like inputs
    order = np.arange(num_inputs, dtype=np.int32) // group
    return {
        f"{name}.qweight": words,
        f"{name}.qzeros": zeros,
        f"{name}.scales": scales.astype(np.float16),
        f"{name}.g_idx": order,
    }


def shards(options: argparse.Namespace) -> Iterator[Tensors]:
    rng, hidden, inner = np.random.default_rng(0), options.hidden, options.inner
    kv = hidden // options.heads * options.kv_heads
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
    }
    matrices |= {"self_attn.o_proj": (hidden, hidden), "mlp.down_proj": (hidden, inner)}
    matrices |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    ones = np.ones(hidden, ml_dtypes.bfloat16)
    for layer in range(options.layers):
        prefix, tensors = f"model.layers.{layer}", Tensors()
        for name, shape in matrices.items():
            tensors |= packed(f"{prefix}.{name}", *shape, options.group, rng)
        yield tensors | {f"{prefix}.{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    for name in ("model.embed_tokens", "lm_head"):
        table = np.empty((options.vocab, hidden), ml_dtypes.bfloat16)
        for begin in range(0, options.vocab, 4096):
            part = table[begin : begin + 4096]
            part[...] = rng.standard_normal(part.shape, np.float32) * 0.02
        yield {f"{name}.weight": table}
    yield {"model.norm.weight": ones}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    options.folder.mkdir(parents=True)
    count, weight_map, total = options.layers + 3, dict[str, str](), 0
    for number, tensors in enumerate(shards(options), start=1):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        save_file(tensors, options.folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (options.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (options.folder / "config.json").write_text(json.dumps(config_of(options), indent=1))
    print(f"{options.folder}: {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
