"""GGUF files of random small models, with every byte under the test's control."""

import struct

import numpy as np

UINT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 5, 6, 7, 8, 9, 10
F32 = 0
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, LAYERS, VOCAB = 4, 2, 16, 64, 96, 2, 40


class Typed:
    """A metadata value of a type that Python's own does not tell."""

    def __init__(self, kind, raw):
        self.kind, self.raw = kind, raw


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item):
    match item:
        case Typed():
            return struct.pack("<I", item.kind) + item.raw
        case bool():
            return struct.pack("<IB", BOOL, item)
        case int():
            return struct.pack("<II", UINT32, item)
        case float():
            return struct.pack("<If", FLOAT32, item)
        case str():
            return struct.pack("<I", STRING) + string(item)
        case [str(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(map(string, item))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(item)}f", ARRAY, FLOAT32, len(item), *item)
        case _:
            return struct.pack(f"<IIQ{len(item)}i", ARRAY, INT32, len(item), *item)


def info(name, shape, kind, offset):
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def gguf_bytes(metadata, tensors, *, version=3, num_tensors=None, num_keys=None, infos=None, alignment=32):
    """`metadata`: pairs of keys and values; `tensors`: name -> (shape, type number, bytes); `infos` replaces theirs."""
    metadata = list(metadata.items()) if isinstance(metadata, dict) else metadata
    data, own = b"", []
    for name, (shape, kind, raw) in tensors.items():
        own.append(info(name, shape, kind, len(data)))
        data += raw + bytes(-len(raw) % alignment)
    infos = own if infos is None else infos
    counts = (len(infos) if num_tensors is None else num_tensors, len(metadata) if num_keys is None else num_keys)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(string(key) + value(item) for key, item in metadata) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def f32(shape, seed=0, scale=0.3, offset=0.0):
    array = np.random.default_rng([seed, *shape]).normal(offset, scale, shape).astype(np.float32)
    return shape, F32, array.tobytes()


def metadata_of(architecture, **more):
    """Keys of a small Llama-like model under the architecture's name."""
    own = {
        "context_length": 64,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **more,
    }
    tokens = ["<unk>", "<s>", "</s>", *(chr(ord("A") + i) for i in range(VOCAB - 3))]
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": item for key, item in own.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * VOCAB,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (VOCAB - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def llama_tensors(head_dim=HEAD_DIM, *, bias=False, qk_norms=False, tied=False, fused=False, post_norms=False):
    """Random tensors under GGUF's names."""
    rows = {"q": HEADS * head_dim, "k": KV_HEADS * head_dim, "v": KV_HEADS * head_dim}
    tensors = {"token_embd.weight": f32((VOCAB, HIDDEN)), "output_norm.weight": f32((HIDDEN,), offset=1.0)}
    if not tied:
        tensors["output.weight"] = f32((VOCAB, HIDDEN), 1)
    for i in range(LAYERS):
        norms = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if post_norms else [])
        layer = {f"{name}.weight": f32((HIDDEN,), i, offset=1.0) for name in norms}
        if fused:
            layer["attn_qkv.weight"] = f32((sum(rows.values()), HIDDEN), i)
            layer["ffn_up.weight"] = f32((2 * FFN, HIDDEN), i)
        else:
            layer |= {f"attn_{x}.weight": f32((size, HIDDEN), i + 10) for x, size in rows.items()}
            layer |= {f"ffn_{name}.weight": f32((FFN, HIDDEN), i + seed) for seed, name in enumerate(("gate", "up"))}
        if bias:
            layer |= {f"attn_{x}.bias": f32((size,), i) for x, size in rows.items()}
        if qk_norms:
            layer |= {f"attn_{x}_norm.weight": f32((head_dim,), i, offset=1.0) for x in "qk"}
        layer["attn_output.weight"] = f32((HIDDEN, rows["q"]), i)
        layer["ffn_down.weight"] = f32((HIDDEN, FFN), i)
        tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def with_experts(tensors, count, size):
    """The same with `count` experts of `size` in the place of every dense feed-forward."""
    matrices = {"gate": (count, size, HIDDEN), "up": (count, size, HIDDEN), "down": (count, HIDDEN, size)}
    changed = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(("gate.weight", "up.weight", "down.weight"))
    }
    for i in range(LAYERS):
        changed[f"blk.{i}.ffn_gate_inp.weight"] = f32((count, HIDDEN), i)
        changed |= {f"blk.{i}.ffn_{name}_exps.weight": f32(shape, i) for name, shape in matrices.items()}
    return changed


def one_tensor_per_expert(tensors):
    """As old files have experts."""
    changed = {}
    for name, (shape, kind, raw) in tensors.items():
        if name.endswith("_exps.weight"):
            size = len(raw) // shape[0]
            for e in range(shape[0]):
                part = raw[e * size : (e + 1) * size]
                changed[name.replace("_exps.weight", f".{e}.weight")] = (shape[1:], kind, part)
        else:
            changed[name] = (shape, kind, raw)
    return changed


def small_llama(**more):
    return gguf_bytes(metadata_of("llama", **more), llama_tensors())
