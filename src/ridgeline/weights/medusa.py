"""Open published Medusa heads (arXiv 2401.10774): a folder with a config.json and one safetensors file.

How many heads and layers there are is what the tensors say: published configs lack it, or say something else.
"""

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from ridgeline.core.errors import ModelLoadError
from ridgeline.program.lower.heads import MedusaHeads, lower_medusa
from ridgeline.spec.reader import ConfigReader
from ridgeline.spec.spec import DecoderSpec
from ridgeline.weights.checkpoint import OTHER_FORMATS, Checkpoint
from ridgeline.weights.folder import ModelFolder
from ridgeline.weights.heads import HeadSource, check_sizes, check_tensors

PREFIX = r"(?:medusa_heads?\.)?"
NAMES = (  # the first publication's, and vLLM's; {}: the logits' matrix stands behind so many layers
    (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"draft.heads.\1.layers.\2.\3"),
    (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"draft.heads.\1.layers.\2.\3"),
    (r"(\d+)\.{}\.weight", r"draft.heads.\1.head.weight"),
    (r"lm_heads\.(\d+)\.weight", r"draft.heads.\1.head.weight"),
)
READ_ELSEWHERE = (  # in the tensors; or of trees, which no draft is; or of training
    *("medusa_num_heads", "medusa_num_layers", "num_heads", "num_hidden_layers", "truncated_vocab_size"),
    *("medusa_fc_bias", "base_model_name_or_path", "max_paths", "topk", "max_seq_len", "tie_word_embeddings"),
)
CONVERT = (
    'Medusa heads are read from safetensors alone; convert them with: python -c "import sys; from torch '
    "import load; from safetensors.torch import save_file; save_file({n: t.clone().contiguous() for n, t in "
    "load(sys.argv[1], 'cpu', weights_only=True).items()}, sys.argv[2])\" medusa_lm_head.pt model.safetensors"
)


def open_medusa(name: str, target: DecoderSpec, target_name: str) -> HeadSource:
    """Open the heads in a folder, or of a hub id, for a model.

    Raises ConfigError for heads of another model or with keys that are not known, ModelLoadError for broken files.
    """
    is_other = Path(name).suffix in OTHER_FORMATS and Path(name).is_file()
    if is_other or not (folder := ModelFolder.open(name)).weight_files():
        raise ModelLoadError(f"{name}: {CONVERT}")
    checkpoint = Checkpoint.open(folder.path)
    stored = _names(checkpoint.entries)
    parts = [ours.split(".") for ours in stored]
    first = checkpoint.entries.get(stored.get("draft.heads.0.head.weight", ""))
    if first is None or len(first.shape) != 2 or not first.shape[0]:
        raise ModelLoadError(f"{folder.path} has no Medusa heads: a matrix 0.1.weight or lm_heads.0.weight is missing")
    mapped, config = "token_map" in checkpoint.entries, ConfigReader(folder.config)
    token_ids_V = checkpoint.tensor("token_map").astype(np.int64).ravel() if mapped else None
    heads = MedusaHeads(
        num_heads=len({part[2] for part in parts}),
        num_layers=len({part[4] for part in parts if part[3] == "layers"}),
        vocab_size=first.shape[0] if mapped else target.vocab_size,
        bias=any(part[-1] == "bias" for part in parts),
        shares_head=config.flag("original_lm_head", False),
    )
    num_tokens = config.integer("vocab_size", target.vocab_size if mapped else first.shape[0])
    check_sizes(folder.path, config.integer("hidden_size", first.shape[1]), num_tokens, target, target_name)
    config.ignore(*READ_ELSEWHERE)
    config.finish()
    layers, program = (len(target.layers),), lower_medusa(heads, target)
    source = HeadSource(folder.path, None, program, layers, token_ids_V, checkpoint, stored, heads.num_heads)
    check_tensors(source, {*stored.values(), "token_map"}, target.vocab_size)
    return source


def _names(entries: Collection[str]) -> dict[str, str]:
    """Return the stored names of what is known, by ours."""
    found: dict[str, str] = {}
    num_layers = len({name.split(".")[-3] for name in entries if name.endswith(".linear.weight")})
    for name in entries:
        for pattern, ours in NAMES:
            if match := re.fullmatch(PREFIX + pattern.format(num_layers), name):
                found[match.expand(ours)] = name
    return found
