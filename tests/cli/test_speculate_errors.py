"""What cannot draft is refused in one line that names it, where a model is generated with, served, or inspected."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, VOCAB = 32, 300


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory):
    """Things that do not fit the tiny model, by name."""
    root = tmp_path_factory.mktemp("drafters")

    def head(name, tensors, **config):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    eagle = {"model_type": "llama", "vocab_size": 999, "rms_norm_eps": 1e-6, **sizes}
    head("eagle-other", {"fc.weight": torch.ones(64, 128)}, **eagle)
    head("medusa-other", {"0.0.linear.weight": torch.ones(64, 64), "0.1.weight": torch.ones(999, 64)})
    for name, change in (("other-ids", None), ("no-context", {"max_position_embeddings": "x"})):
        shutil.copytree(model_folder, root / name)
        config = json.loads((root / name / "config.json").read_text())
        (root / name / "config.json").write_text(json.dumps(config | (change or {})))
    tokenizer = json.loads((root / "other-ids/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [
        token for token, token_id in sorted(vocab.items(), key=lambda pair: pair[1]) if token_id in (60, 61)
    ]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (root / "other-ids/tokenizer.json").write_text(json.dumps(tokenizer))
    return root


@pytest.mark.parametrize("command", [("generate", "x", "-m"), ("serve",), ("inspect",)], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("speculate", "words"),
    [
        ("draft:{}/other-ids", ("other-ids cannot draft for", "token 60 is", "both need the same vocabulary")),
        ("draft:{}/no-context", ("no-context cannot draft", "max_position_embeddings='x' is invalid")),
        ("draft:python-1m", ("python-1m cannot draft for", "token 258 is")),
        ("draft:{}/nowhere", ("nowhere",)),
        ("eagle:{}/eagle-other", ("eagle-other cannot draft for", "hidden size 64 and 999 tokens", "32 and 300")),
        ("medusa:{}/medusa-other", ("medusa-other cannot draft for", "hidden size 64 and 999 tokens", "32 and 300")),
        ("eagle:{}/medusa-other", ("medusa-other is no EAGLE head: it has no fc.weight",)),
        ("medusa:{}/eagle-other", ("eagle-other has no Medusa heads",)),
        ("nonsense", ("speculate must be", "'nonsense'")),
        ("draft", ("speculate=draft lacks its model",)),
        ("eagle", ("came without a head (eagle3 or eagle within its folder)", "write speculate=eagle:HEAD")),
        ("medusa", ("came without a head (medusa within its folder)",)),
        ("mtp", ("has no predictor layer", "leave speculate=mtp out")),
        ("mtp:{}/eagle-other", ("mtp needs no model; write mtp",)),
    ],
)
def test_what_cannot_draft_is_one_line(command, speculate, words, ridgeline, model_folder, folders):
    done = ridgeline(*command, model_folder, "--speculate", speculate.format(folders))
    assert done.code in (2, 3)
    lines = [line for line in done.err.splitlines() if line]
    assert len(lines) == 1, done.err
    for word in words:
        assert word in lines[0]
    assert done.out == ""
