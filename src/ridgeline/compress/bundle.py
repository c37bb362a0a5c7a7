"""The bundled models: the whole run from corpus to a Hugging Face folder with its card.

`presets/` has what they are:

python-9m   the model in the box: Llama-shaped, writes Python
python-1m   its draft, for speculation: the same tokenizer, a tenth of the size
python-1m-diffusion   the draft's twin that fills in masks, block by block; not in the box: train it where it is needed
"""

import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from ridgeline.backends.reference.dense import DenseModel
from ridgeline.backends.reference.tensors import as_arrays, as_tensors
from ridgeline.compress.bpe import save_tokenizer, train_bpe
from ridgeline.compress.card import TrainingFacts, write_card
from ridgeline.compress.diffusion import diffusion_bits
from ridgeline.compress.presets import Preset, load_preset
from ridgeline.compress.train import Progress, TextLoss, TokenStream, bits_per_byte, initial_model, train
from ridgeline.core.dtypes import BFLOAT16, FLOAT32
from ridgeline.core.errors import ConfigError
from ridgeline.program.lower import lower
from ridgeline.quality.corpus import SourceFile, fingerprint, split, standard_library
from ridgeline.spec.families import read_spec
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.load import load_weights
from ridgeline.weights.save import save_weights

VOCAB_SIZE = 4096  # of the tokenizer, before a preset's own special tokens
QUICK_EVAL_TOKENS = 32 << 10  # during training; the card's figure is over all held-out text
STORED_DTYPE = BFLOAT16
GENERATION_DEFAULTS = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}  # greedy, small models go in circles


def train_bundled(
    name: str,
    out: Path,
    report: Callable[[Progress], None],
    *,
    tokenizer_folder: Path | None = None,
    num_tokens: int | None = None,
) -> TrainingFacts:
    """Train preset `name` into the folder `out`; `tokenizer_folder` gives the tokenizer of a model trained before.

    The folder is written at every evaluation, so that an interrupted run leaves the latest weights.
    Raises ConfigError for an unknown preset, and for a tokenizer beside a preset that starts from a model with its own.
    """
    preset = load_preset(name)
    recipe = preset.recipe(num_tokens)
    out.mkdir(parents=True, exist_ok=True)
    train_files, held_out_files = split(standard_library())
    start = None if preset.starts_from is None else ModelFolder.open(preset.starts_from)
    if start is not None and tokenizer_folder is not None:
        raise ConfigError(f"{name} starts from {preset.starts_from} and keeps its tokenizer; drop the other tokenizer")
    shared = tokenizer_folder if start is None else start.path
    texts = (file.text for file in train_files)
    tokenizer = Tokenizer.from_file(str(shared / "tokenizer.json")) if shared else train_bpe(texts, VOCAB_SIZE)
    train_tokens, held_out_tokens = _encode(tokenizer, train_files), _encode(tokenizer, held_out_files)
    spec = _write_config(preset, tokenizer, out)
    quick = held_out_tokens[:QUICK_EVAL_TOKENS]
    quick_bytes = len(tokenizer.decode(quick.tolist()).encode())
    device, started = torch.get_default_device(), time.monotonic()
    quick_bits = partial(_held_out_bits, spec=spec, tokens=quick, num_bytes=quick_bytes, dtype=recipe.dtype)
    begun = None if start is None else _weights(start)
    model = initial_model(spec, recipe.seed, begun)
    for progress in train(model, recipe, train_tokens, quick_bits, TextLoss(spec, recipe.dtype)):
        report(progress)
        if progress.held_out is not None:
            save_weights(out, spec, as_arrays(model.named_weights()), STORED_DTYPE)
    training_s, program = time.monotonic() - started, lower(spec)
    stored = DenseModel(program, _weights(ModelFolder.open(out)))
    held_out_bytes = _num_bytes(held_out_files)
    facts = TrainingFacts(
        name=name,
        num_parameters=program.num_parameters,
        recipe=recipe,
        python_version=platform.python_version(),
        num_train_files=len(train_files),
        num_train_tokens=len(train_tokens),
        train_bytes=_num_bytes(train_files),
        corpus_sha256=fingerprint(train_files + held_out_files),
        held_out_modules=tuple(sorted({file.module for file in held_out_files})),
        held_out_bytes=held_out_bytes,
        held_out_bits_per_byte=_held_out_bits(stored, spec, held_out_tokens, held_out_bytes, torch.float32),
        fills_masks=spec.diffusion is not None,
        starts_from=preset.starts_from,
        training_s=training_s,
        device=f"{torch.get_num_threads()} CPU threads" if device.type == "cpu" else str(device),
    )
    write_card(out, facts)
    return facts


def _num_bytes(files: list[SourceFile]) -> int:
    return sum(len(file.text.encode()) for file in files)


def _encode(tokenizer: Tokenizer, files: list[SourceFile]) -> TokenStream:
    encodings = tokenizer.encode_batch([file.text for file in files])
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])


def _write_config(preset: Preset, tokenizer: Tokenizer, out: Path) -> DecoderSpec:
    """Write config.json, the generation defaults and the tokenizer, which learns the preset's special tokens."""
    tokenizer.add_special_tokens(list(preset.token_ids.values()))  # those it knows keep their ids
    token_ids = {key: tokenizer.token_to_id(token) for key, token in preset.token_ids.items()}
    config = {**preset.config, "vocab_size": tokenizer.get_vocab_size(), **token_ids}
    spec = read_spec(config)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **GENERATION_DEFAULTS}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, out, spec.max_positions)
    return spec


def _held_out_bits(
    model: DenseModel, spec: DecoderSpec, tokens: TokenStream, num_bytes: int, dtype: torch.dtype
) -> float:
    """Measure the bits per byte of held-out text; for a model that fills in masks, the bound on them."""
    if spec.diffusion is not None:
        return diffusion_bits(model, tokens, num_bytes, spec.diffusion.mask_id, dtype)
    return bits_per_byte(model, tokens, num_bytes, dtype)


def _weights(folder: ModelFolder) -> dict[str, torch.Tensor]:
    spec = read_spec(folder.config)
    return as_tensors(load_weights(folder, spec, lower(spec), FLOAT32))
