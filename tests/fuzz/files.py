"""Fuzzers of files: models, adapters, packs, journals, batches, keys, options and traces."""

import contextlib
import io
import json
import logging
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from small_gguf import small_llama
from tests.fuzz.harness import Finding, Open, Target, refusing

from families import names, tiny_config
from ridgeline.backends.native.packs.file import open_pack, write_pack
from ridgeline.bench.workload import Workload
from ridgeline.bench.workloads.azure import Azure
from ridgeline.bench.workloads.mooncake import Mooncake
from ridgeline.core.dtypes import FLOAT32
from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.engine.recording import read_recording
from ridgeline.program.lower import lower
from ridgeline.server.batch.journal import Journal
from ridgeline.server.batch.lines import Work
from ridgeline.server.clients import Keys
from ridgeline.spec.families import read_spec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.gguf.reader import GgufFile
from ridgeline.weights.jsonfile import read_json_object
from ridgeline.weights.load import load_weights, prequantized
from ridgeline.weights.lora import CONFIG, TENSORS, read_adapter

HIDDEN, FFN, VOCAB = 16, 24, 20
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
LARGEST_CONTEXT = 4096


def loaded(path: Path) -> None:
    """Do what an engine does with a model before it computes."""
    folder = ModelFolder.open(path)
    spec = read_spec(folder.config)
    program = lower(spec, min(spec.max_positions, LARGEST_CONTEXT))
    with np.errstate(all="ignore"):
        weights = load_weights(folder, spec, program, FLOAT32)
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if shapes != program.weights:
            raise Finding("weights have other shapes than the program's")
        stored = prequantized(folder, spec, program)
        for name in stored.formats if stored is not None else ():
            for expert in range(program.weights[name][0] if len(program.weights[name]) == 3 else 1):
                stored.matrix(name, expert)
    if (tokenizer := folder.tokenizer()) is not None:
        tokenizer.decode(tokenizer.encode("Once upon a time 12 \n"))


def gguf(folder: Path) -> Target:
    path = folder / "model.gguf"
    content = small_llama()
    path.write_bytes(content)
    head = min(tensor.offset for tensor in GgufFile.open(path).tensors.values())

    def run(data: bytes) -> bool:
        path.write_bytes(data)
        with refusing(ModelLoadError) as refused:
            loaded(path)
        if refused and str(path) not in str(refused[0]):
            raise Finding(f"the error does not name the file: {refused[0]}")
        return not refused

    return Target(run, [content], head=head)


def tiny_llama() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in LAYER.items()}
    return {f"{name}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def safetensors(folder: Path) -> Target:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    content = save(tiny_llama())

    def run(data: bytes) -> bool:
        (folder / "model.safetensors").write_bytes(data)
        with refusing(ModelLoadError) as refused:
            loaded(folder)
        return not refused

    head = 8 + struct.unpack_from("<Q", content)[0]
    return Target(run, [content], (b'"F16"', b'"I64"', b'"shape":[', b'"data_offsets":[0,'), head)


def config(folder: Path) -> Target:
    """Configurations of every family, read and lowered."""
    path = folder / "config.json"

    def run(data: bytes) -> bool:
        path.write_bytes(data)
        with refusing(ConfigError, ModelLoadError) as refused:
            spec = read_spec(read_json_object(path))
            lower(spec, min(spec.max_positions, LARGEST_CONTEXT))
        return not refused

    seeds = [json.dumps(tiny_config(name, number)).encode() for name in names() for number in range(2)]
    return Target(run, seeds, (b": 0,", b": -1,", b": 1e308,", b": null,", b": {},", b": [],", b": 9999999,"))


def adapter(folder: Path) -> Target:
    """PEFT's two files, the length of the first before them."""
    spec = read_spec(LLAMA)
    program = lower(spec, 64)

    def run(data: bytes) -> bool:
        length = int.from_bytes(data[:2], "little")
        (folder / CONFIG).write_bytes(data[2 : 2 + length])
        (folder / TENSORS).write_bytes(data[2 + length :])
        with refusing(ModelLoadError) as refused, np.errstate(all="ignore"):
            read_adapter("a", str(folder), spec, program)
        return not refused

    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    about = json.dumps(settings | {"rank_pattern": {"q_proj": 2}, "use_rslora": True}).encode()
    tensors = {}
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        outputs, inputs = LAYER[name]
        before = f"base_model.model.model.layers.0.{name}.lora_"
        tensors |= {f"{before}A.weight": np.ones((2, inputs), np.float32)}
        tensors |= {f"{before}B.weight": np.ones((outputs, 2), np.float32)}
    content = len(about).to_bytes(2, "little") + about + save(tensors)
    return Target(run, [content], (b'"r": 0', b'"lora_alpha": null', b'"F16"', b'"(a+)+$"'), head=len(about) + 600)


PACK_WORDS = (b'"offset":4096', b'"num_bytes":', b'"checksum":')


def quiet(name: str) -> Callable[[], None]:
    """Let a logger write no warnings; return what makes it as it was."""
    logger = logging.getLogger(name)
    restore = partial(logger.setLevel, logger.level)
    logger.setLevel(logging.CRITICAL)
    return restore


def pack(folder: Path) -> Target:
    """Packs as they are, and with right checksums of a wrong index."""
    path = folder / "a.pack"
    restore = quiet("ridgeline.packcache")  # each that is refused is a warning
    write_pack(path, "key", [("a", memoryview(bytes(100))), ("b", memoryview(b"x" * 5000))])
    whole = path.read_bytes()
    (at,) = struct.unpack_from("<Q", whole, 16)

    def run(data: bytes) -> bool:
        if data[0] % 2:
            index = data[1:]
            head = struct.pack("<8sIIQQ28x", whole[:8], 2, zlib.crc32(index), at, len(index))
            path.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + whole[64:at] + index)
        else:
            path.write_bytes(data[1:])
        parts = open_pack(path, "key")
        return parts is not None and sum(map(len, parts.values())) >= 0

    return Target(run, [b"\0" + whole, b"\1" + whole[at:]], PACK_WORDS, 200, restore)


def journal(folder: Path) -> Target:
    from ridgeline import LLM, SamplingParams  # what only some fuzzers need is imported by these

    path = folder / "run.journal"
    llm = LLM("python-1m", num_threads=1, journal=str(path), max_model_len=64)
    llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), use_tqdm=False)
    llm.engine.loop.close()
    restore = quiet("ridgeline.journal")  # each that is cut off is a warning

    def run(data: bytes) -> bool:
        path.write_bytes(data)
        with refusing(ConfigError) as refused:
            recording = read_recording(path)
            for step in recording.steps[:100]:
                recording.spans_of(step)
            for output in recording.outputs[:100]:
                recording.hashes_of(output)
        return not refused

    content = path.read_bytes()
    return Target(run, [content, content[:-7]], (b"steps", b"outputs", b"<i8", b"|O", b"<f8"), close=restore)


def results(folder: Path) -> Target:
    """The file of results that a batch goes on from."""
    path = folder / "out.jsonl"

    def run(data: bytes) -> bool:
        path.write_bytes(data)
        with refusing(ConfigError) as refused:
            Journal(path).close()
            if path.read_bytes() != data[: data.rfind(b"\n") + 1]:
                raise Finding("results are lost")
        return not refused

    line = {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "r", "body": {}}}
    other = {"id": "batch_req_2", "custom_id": None, "error": {"code": "c", "message": "m", "line": 2}}
    seed = json.dumps(line) + "\n" + json.dumps(other) + "\n" + '{"id'
    return Target(run, [seed.encode()], (b"\n", b'"error": null', b'"line": ', b'"custom_id": '))


def batch(folder: Path) -> Target:
    """Lines that a batch asks for: each is one, a problem, or blank."""
    path = folder / "in.jsonl"

    def run(data: bytes) -> bool:
        path.write_bytes(data[1:])
        work = Work.read(path, 1000, (None, "/v1/completions")[data[0] % 2])
        if work.num_left != sum(1 for _ in work.left()):
            raise Finding("lines are lost")
        return not work.problems

    lines = [
        {"custom_id": str(n), "method": "POST", "url": url, "body": {"prompt": "a", "stream": False}}
        for n, url in enumerate(("/v1/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"))
    ]
    seed = "\r\n\n".join(map(json.dumps, lines)).encode()
    return Target(run, [b"\0" + seed, b"\1" + seed[:150]], (b"\n", b'"stream": true', b'"body": 1', b'"url": "'))


def keys(folder: Path) -> Target:
    path = folder / "keys.toml"

    def run(data: bytes) -> bool:
        path.write_bytes(data)
        with refusing(ConfigError) as refused:
            Keys(None, str(path)).client_of("secret", "")
        return not refused

    seed = b'[a]\nkey = "secret"\nrequests_per_minute = 5\n\n[b]\nkey = ["x", "y"]\ntokens_per_minute = 1_000\n'
    return Target(run, [seed], (b"key = ''", b"= inf", b"= 1979-05-27T07:32:00Z", b"[[", b"a.b = ", b'"""', b"= {"))


def options(folder: Path) -> Target:
    """The file of `serve --config`, as the command shows what it took of it."""
    from ridgeline.cli import main

    path = folder / "options.toml"

    def run(data: bytes) -> bool:
        path.write_bytes(data)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                code = main(["serve", "python-1m", "--config", str(path), "--print-config"])
            except SystemExit as end:
                code = end.code
        if code and (code != 2 or "Traceback" in said.getvalue() or len(said.getvalue()) < 20):
            raise Finding(f"exit code {code}: {said.getvalue()[-500:]}")
        return not code

    seed = b'port = 9000\nmax-model-len = 128\nserved-model-name = ["a", "b"]\nlog_level = "info"\n'
    return Target(run, [seed], (b"= -1", b"= nan", b"= true", b"= []", b"= {a = 1}", b"prefix-caching", b"= [[1]]"))


def trace(kind: type[Workload], seed: bytes, words: tuple[bytes, ...]) -> Open:
    """Return the fuzzer of a workload's file."""

    def opened(folder: Path) -> Target:
        path = folder / "trace"

        def run(data: bytes) -> bool:
            path.write_bytes(data)
            with refusing(ConfigError) as refused:
                found = kind(path=str(path), num_requests=20, max_prompt_tokens=64).requests()
                if not found or any(request.max_tokens < 1 or request.arrival_s < 0 for request in found):
                    raise Finding(f"impossible requests: {found[:3]}")
            return not refused

        return Target(run, [seed], words)

    return opened


azure = trace(
    Azure,
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04,9,1\n",
    (b"+01:00", b"Z", b'"', b"\x00", b"9" * 30, b"0001-01-01", b"9999-12-31", b"-5", b",,"),
)
mooncake = trace(
    Mooncake,
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 1000.5, "input_length": 60, "output_length": 52, "hash_ids": [0]}\n',
    (b"1e308", b"-1e308", b"-5", b"9" * 30, b'"hash_ids": [', b"\n\n"),
)
