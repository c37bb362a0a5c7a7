"""Write a folder of random weights in a quantized format, by default of the shape of an 8B Llama, a layer at a time.

usage: python -m benchmarks.random_folder FOLDER [--format gptq] [--hidden 4096 --inner 14336 --layers 32 --heads 32
                                          --kv-heads 8 --head-dim 128 --vocab 128256 --group 128]

Speed, memory and the time of a start do not depend on what weights say: `python -m benchmarks.startup --model FOLDER
--repeats 1` measures the first start and the most memory that it takes, `benchmarks.decode_stream --formats FOLDER` and
`benchmarks.roof --formats FOLDER` steps. A layer is in memory, then the embedding, then the head. With a type of GGUF's
(--format Q4_K) the folder has one file, made of all of them at once; it needs the package gguf.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ridgeline import quant
from ridgeline.core.dtypes import BFLOAT16, FLOAT8_E4M3, float32
from ridgeline.quant.stored import StoredFormat, StoredMatrix
from ridgeline.weights.formats import bitsandbytes, compressed_tensors
from ridgeline.weights.packing.outliers import with_outliers

BITS = 4
CODES = 32 // BITS  # in a word
OUTLIERS = 0.01  # share of the inputs of llm-int8 that keep 16 bits
Tensors = dict[str, np.ndarray]
Packed = Callable[[str, int, int, int, np.random.Generator], Tensors]  # of name, outputs, inputs, group
# Bytes of a super-block of 256 weights, and where in it its float16 are.
GGUF_TYPES: Mapping[str, tuple[int, Sequence[int]]] = {"Q4_K": (144, (0, 2)), "Q6_K": (210, (208,))}
GGUF_BLOCK = 256
GGUF_NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
GGUF_NAMES |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}


def scale_of(num_inputs: int, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Scales with which integers of 4 bits give outputs like their inputs."""
    return rng.uniform(0.5, 1.5, shape) / (4.6 * num_inputs**0.5)


def gptq(name: str, num_outputs: int, num_inputs: int, group: int, rng: np.random.Generator) -> Tensors:
    """A matrix in the layout of GPTQ, version 1: zeros of 8 are stored as 7."""
    num_groups = num_inputs // group
    return {
        f"{name}.qweight": rng.integers(-(1 << 31), 1 << 31, (num_inputs // CODES, num_outputs), dtype=np.int32),
        f"{name}.qzeros": np.full((num_groups, num_outputs // CODES), 0x77777777, np.int32),
        f"{name}.scales": scale_of(num_inputs, rng, num_groups, num_outputs).astype(np.float16),
        f"{name}.g_idx": np.arange(num_inputs, dtype=np.int32) // group,
    }


def awq(name: str, num_outputs: int, num_inputs: int, group: int, rng: np.random.Generator) -> Tensors:
    """A matrix in the layout of AWQ's gemm."""
    num_groups = num_inputs // group
    return {
        f"{name}.qweight": rng.integers(-(1 << 31), 1 << 31, (num_inputs, num_outputs // CODES), dtype=np.int32),
        f"{name}.qzeros": np.full((num_groups, num_outputs // CODES), 0x88888888, np.uint32).view(np.int32),
        f"{name}.scales": scale_of(num_inputs, rng, num_groups, num_outputs).astype(np.float16),
    }


def of_scheme(form: StoredFormat) -> Packed:
    """A matrix as `ridgeline quantize` writes it."""
    eight = form.code == "uniform" and form.bits == 8
    write = bitsandbytes.packed_tensors if form.code == "nf4" or eight else compressed_tensors.packed_tensors

    def packed(name: str, num_outputs: int, num_inputs: int, group: int, rng: np.random.Generator) -> Tensors:
        own = replace(form, group=group) if form.code == "uniform" and not eight else form
        codes = rng.integers(0, 1 << form.bits, (num_outputs, num_inputs), dtype=np.uint8)
        if form.code == "e4m3":
            codes[codes & 0x7F == 0x7F] = 0  # those are no numbers
        scales = scale_of(num_inputs, rng, num_outputs, own.num_groups(num_inputs))
        outer = np.full((num_outputs, 1), -8192, np.float32) if form.scale == "e4m3" else None
        match form.scale:
            case "e8m0":
                scales = np.exp2(np.rint(np.log2(scales)))
            case "e4m3":
                scales = (scales * 8192).astype(FLOAT8_E4M3)
            case _:
                scales = scales.astype(BFLOAT16)
        stored = StoredMatrix(own, codes, float32(scales), outer=outer)
        every = round(1 / OUTLIERS)
        outliers = np.arange(every // 2, num_inputs if eight else 0, every, dtype=np.int32)
        return write(name, with_outliers(stored, outliers), np.dtype(BFLOAT16))

    return packed


def dense(name: str, num_outputs: int, num_inputs: int, group: int, rng: np.random.Generator) -> Tensors:
    weights = rng.standard_normal((num_outputs, num_inputs), np.float32) / np.float32(num_inputs**0.5)
    return {f"{name}.weight": weights.astype(ml_dtypes.bfloat16)}


FORMS = {name: quant.scheme(name).stored_format(None, False) for name in ("int4", "nf4", "fp8", "mxfp4", "nvfp4")}
FORMS["llm-int8"] = StoredFormat("uniform", 8, 0, scale="float32")
FORMATS: Mapping[str, Packed] = {
    "gptq": gptq,
    "awq": awq,
    "bf16": dense,
    **{name: of_scheme(form) for name, form in FORMS.items()},
}


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """The quantization_config of the format."""
    shared = {"quant_method": options.format, "bits": BITS, "group_size": options.group}
    match options.format:
        case "gptq":
            return shared | {"sym": True, "desc_act": False}
        case "awq":
            return shared | {"zero_point": True, "version": "gemm"}
        case "nf4" | "llm-int8":
            return bitsandbytes.quantization_config(FORMS[options.format], ["lm_head"], {})
        case name:
            form = FORMS[name]
            own = replace(form, group=options.group) if form.code == "uniform" else form
            return compressed_tensors.quantization_config(own, ["lm_head"], {})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=[*FORMATS, *GGUF_TYPES], default="gptq")
    sizes = {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv-heads": 8, "head-dim": 128}
    for name, size in (sizes | {"vocab": 128256, "group": 128}).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(arguments)


def config_of(options: argparse.Namespace) -> dict[str, object]:
    config = {
        "model_type": "llama",
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": options.inner,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config | ({} if options.format == "bf16" else {"quantization_config": settings_of(options)})


def shapes(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of a layer."""
    hidden, inner = options.hidden, options.inner
    q, kv = options.heads * options.head_dim, options.kv_heads * options.head_dim
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    ffn = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"self_attn.{name}": shape for name, shape in attention.items()} | {
        f"mlp.{name}": shape for name, shape in ffn.items()
    }


def shards(options: argparse.Namespace) -> Iterator[Tensors]:
    rng, hidden, packed = np.random.default_rng(0), options.hidden, FORMATS[options.format]
    ones = np.ones(hidden, ml_dtypes.bfloat16)
    for layer in range(options.layers):
        prefix, tensors = f"model.layers.{layer}", Tensors()
        for name, shape in shapes(options).items():
            tensors |= packed(f"{prefix}.{name}", *shape, options.group, rng)
        yield tensors | {f"{prefix}.{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    for name in ("model.embed_tokens", "lm_head"):
        yield {f"{name}.weight": table(options, rng)}
    yield {"model.norm.weight": ones}


def table(options: argparse.Namespace, rng: np.random.Generator) -> np.ndarray:
    made = np.empty((options.vocab, options.hidden), ml_dtypes.bfloat16)
    for begin in range(0, options.vocab, 4096):
        part = made[begin : begin + 4096]
        part[...] = rng.standard_normal(part.shape, np.float32) * 0.02
    return made


def write_gguf(options: argparse.Namespace) -> int:
    """One file without a tokenizer, its tables in float16; returns the bytes of its tensors."""
    import gguf

    rng, kind = np.random.default_rng(0), options.format
    block_bytes, halves = GGUF_TYPES[kind]
    writer = gguf.GGUFWriter(options.folder / f"{options.folder.name}.gguf", "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(options.hidden)
    writer.add_block_count(options.layers)
    writer.add_feed_forward_length(options.inner)
    writer.add_head_count(options.heads)
    writer.add_head_count_kv(options.kv_heads)
    writer.add_key_length(options.head_dim)
    writer.add_value_length(options.head_dim)
    writer.add_rope_dimension_count(options.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(options.vocab)
    total, ones = 0, np.ones(options.hidden, np.float32)
    for layer in range(options.layers):
        for name, (num_outputs, num_inputs) in shapes(options).items():
            blocks = rng.integers(0, 256, (num_outputs * num_inputs // GGUF_BLOCK, block_bytes), dtype=np.uint8)
            scales = scale_of(num_inputs, rng, len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
            for at in halves:
                blocks[:, at : at + 2] = scales
            own = f"blk.{layer}.{GGUF_NAMES[name.split('.')[1]]}.weight"
            writer.add_tensor(own, blocks.reshape(num_outputs, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
            total += blocks.nbytes
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
    for name in ("token_embd", "output"):
        half = table(options, rng).astype(np.float16)
        writer.add_tensor(f"{name}.weight", half)
        total += half.nbytes
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    options.folder.mkdir(parents=True)
    total = write_gguf(options) if options.format in GGUF_TYPES else write_folder(options)
    print(f"{options.folder}: {total / 1e9:.2f} GB")


def write_folder(options: argparse.Namespace) -> int:
    count, weight_map, total = options.layers + 3, dict[str, str](), 0
    for number, tensors in enumerate(shards(options), start=1):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        save_file(
            {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
            options.folder / file,
            {"format": "pt"},
        )
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (options.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (options.folder / "config.json").write_text(json.dumps(config_of(options), indent=1))
    return total


if __name__ == "__main__":
    main()
