"""List the models at hand: bundled, fetched, and in the hub's cache. Read their configs, not their weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.core.errors import RidgelineError
from ridgeline.spec.families import read_spec
from ridgeline.weights.fetch import PUBLISHED, fetched
from ridgeline.weights.folder import BUNDLED_MODELS
from ridgeline.weights.gguf.model import GgufModel
from ridgeline.weights.jsonfile import read_json_object

Origin = Literal["bundled", "fetched", "hub cache"]
Use = Literal["chat", "completion", "embed"]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model by the name that commands take. `problem` says why it cannot be used, and then the rest is unknown."""

    name: str
    origin: Origin
    path: Path
    num_bytes: int
    uses: tuple[Use, ...] = ()
    context: int | None = None
    problem: str | None = None


def list_models() -> list[ModelEntry]:
    """Return all models at hand, those that need no download first."""
    return [_entry(*found) for found in (*_here(), *_in_hub_cache())]


def _here() -> Iterator[tuple[str, Origin, Path]]:
    for path in sorted(BUNDLED_MODELS.iterdir()):
        if (path / "config.json").is_file():
            yield path.name, "bundled", path
    for name in PUBLISHED:
        if path := fetched(name):
            yield name, "fetched", path


def _in_hub_cache() -> Iterator[tuple[str, Origin, Path]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        path = repo.repo_path if newest is None else newest.snapshot_path
        if repo.repo_type == "model" and (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            yield repo.repo_id, "hub cache", path


def _entry(name: str, origin: Origin, path: Path) -> ModelEntry:
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    try:
        config, template = _config_and_template(path)
        spec = read_spec(config)
    except RidgelineError as error:
        return ModelEntry(name, origin, path, num_bytes, problem=str(error))
    uses: tuple[Use, ...] = ("embed",) if spec.head is None else ("chat", "completion", "embed")
    if spec.head is not None and "role" not in template:  # a template that knows no roles makes no conversation
        uses = ("completion", "embed")
    return ModelEntry(name, origin, path, num_bytes, uses, spec.max_positions)


def _config_and_template(path: Path) -> tuple[Mapping[str, object], str]:
    """Read the config, and the text in which a chat template would be. Raises ModelLoadError and ConfigError."""
    if path.is_file():
        model = GgufModel.open(path)
        return model.config, str(model.metadata.get("tokenizer.chat_template", ""))
    config = read_json_object(path / "config.json")
    template = path / "chat_template.jinja"
    if template.is_file():
        return config, template.read_text(encoding="utf-8", errors="replace")
    tokenizer = path / "tokenizer_config.json"
    return config, str(read_json_object(tokenizer).get("chat_template", "")) if tokenizer.is_file() else ""
