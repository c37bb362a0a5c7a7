"""ModelFolder.open: where a model comes from, and the defaults of generation_config.json."""

import json
import logging

import huggingface_hub
import pytest
from small_checkpoint import LLAMA, write

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.weights import folder as folder_module
from ridgeline.weights.folder import GenerationDefaults, ModelFolder


def defaults(folder, generation, **config) -> GenerationDefaults:
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelFolder.open(folder).generation_config


def test_local_folder(tmp_path):
    write(tmp_path / "llama-tiny", LLAMA)
    opened = ModelFolder.open(str(tmp_path / "llama-tiny"))
    assert opened.path == tmp_path / "llama-tiny" and opened.name == "llama-tiny"
    assert opened.config == LLAMA
    assert opened.generation_config == GenerationDefaults(eos_token_ids=(2,))


def test_bundled_model_by_name(tmp_path, monkeypatch):
    write(tmp_path / "models" / "pocket", LLAMA)
    monkeypatch.setattr(folder_module, "BUNDLED_MODELS", tmp_path / "models")
    assert ModelFolder.open("pocket").path == tmp_path / "models" / "pocket"
    with pytest.raises(ConfigError, match="revision"):
        ModelFolder.open("pocket", revision="main")


def test_hub_id_is_fetched_at_one_revision(tmp_path, monkeypatch):
    write(tmp_path, LLAMA)
    asked = []

    def snapshot_download(hub_id, **options):
        asked.append((hub_id, options["revision"]))
        in_repository = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "run.py"]
        in_repository += ["pytorch_model.bin", "consolidated.safetensors", "onnx/config.json"]
        wanted = huggingface_hub.utils.filter_repo_objects(
            in_repository, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        )
        assert list(wanted) == ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    opened = ModelFolder.open("org/tiny", revision="abc123")
    assert asked == [("org/tiny", "abc123")] and opened.path == tmp_path and opened.name == "org/tiny"


def test_hub_without_network_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"org/no-such-model.*could not be fetched"):
        ModelFolder.open("org/no-such-model")


@pytest.mark.parametrize(
    "name", ["./missing", "/no/such/folder", "a/b/c", "", "~nobody-here/x", "..", "a\0b", "x" * 5000]
)
def test_what_is_neither_folder_nor_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError):
        ModelFolder.open(name)


def test_revision_of_a_folder_is_refused(tmp_path):
    write(tmp_path, LLAMA)
    with pytest.raises(ConfigError, match="revision"):
        ModelFolder.open(tmp_path, revision="main")


def test_generation_defaults_are_read(tmp_path):
    generation = {"eos_token_id": [2, 7], "bos_token_id": 1, "pad_token_id": 0, "do_sample": True, "temperature": 0.6}
    generation |= {"top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 64}
    assert defaults(tmp_path, generation) == GenerationDefaults((2, 7), 1, 0, 0.6, 0.9, 50, 0.05, 1.1, 64)


def test_do_sample_false_is_greedy(tmp_path):
    generation = {"do_sample": False, "temperature": 0.6, "top_k": 50, "repetition_penalty": 1.1}
    assert defaults(tmp_path, generation) == GenerationDefaults((2,), temperature=0.0, repetition_penalty=1.1)


def test_token_ids_fall_back_to_config(tmp_path):
    read = defaults(tmp_path, {}, eos_token_id=[3, 4], bos_token_id=5, pad_token_id=-1)
    assert (read.eos_token_ids, read.bos_token_id, read.pad_token_id) == ((3, 4), 5, None)
    assert defaults(tmp_path, {"eos_token_id": 6}, eos_token_id=[3, 4]).eos_token_ids == (6,)
    assert defaults(tmp_path, {}, eos_token_id=None).eos_token_ids == ()


def test_rule_that_is_not_honoured_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="ridgeline.weights"):
        defaults(tmp_path, {"suppress_tokens": [5], "num_beams": None, "transformers_version": "5.0"})
    assert "suppress_tokens" in caplog.text and "num_beams" not in caplog.text


@pytest.mark.parametrize(
    "generation",
    [
        {"eos_token_id": 11},
        {"eos_token_id": [-1]},
        {"eos_token_id": "2"},
        {"eos_token_id": [[2]]},
        {"eos_token_id": True},
        {"bos_token_id": 1.5},
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 1.5},
        {"min_p": 2},
        {"max_new_tokens": 0},
        {"do_sample": "no"},
    ],
)
def test_generation_value_out_of_range(tmp_path, generation):
    with pytest.raises(ConfigError, match=next(iter(generation))):
        defaults(tmp_path, generation)
