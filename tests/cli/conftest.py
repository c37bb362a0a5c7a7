"""A small random model in a folder, with a tokenizer and a chat template, and a way to run commands in this process."""

import io
import json
import logging
import sys
from dataclasses import dataclass

import pytest
import torch

from ridgeline.backends.reference.tensors import as_arrays
from ridgeline.cli import main
from ridgeline.compress.bpe import save_tokenizer, train_bpe
from ridgeline.core.dtypes import FLOAT32
from ridgeline.program.lower import lower
from ridgeline.spec.families import read_spec
from ridgeline.weights.save import save_weights

CONTEXT = 96
CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "vocab_size": 300,
    "eos_token_id": 299,  # no token of the vocabulary: answers end by their length
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = train_bpe(["def add(a, b):\n    return a + b\n", "import os\nprint(os.name)\n"] * 4, 290)
    save_tokenizer(tokenizer, folder, CONTEXT)
    spec = read_spec(CONFIG)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 if len(shape) > 1 else torch.ones(shape)
        for name, shape in lower(spec).weights.items()
    }
    save_weights(folder, spec, as_arrays(weights), FLOAT32)
    return folder


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def ridgeline(capsys, monkeypatch):
    """Runs a command line in this process; `stdin` is text or bytes."""
    logger = logging.getLogger("ridgeline")
    level, num_threads = logger.level, torch.get_num_threads()

    def run(*arguments, stdin=""):
        content = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(ended.value.code or 0, captured.out, captured.err)

    yield run
    logger.setLevel(level)
    torch.set_num_threads(num_threads)
