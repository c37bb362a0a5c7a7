"""All fuzzers by name, each with the module that has it: one needs little of what the others import."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from tests.fuzz.harness import Target

PARSERS: Mapping[str, str] = {
    **dict.fromkeys(("http", "bodies", "frames"), "servers"),
    **dict.fromkeys(("template", "messages", "tokenizer", "tool_calls", "reasoning", "grammar", "events"), "texts"),
    **dict.fromkeys(("gguf", "safetensors", "config", "adapter", "pack", "journal"), "files"),
    **dict.fromkeys(("results", "batch", "keys", "options", "azure", "mooncake"), "files"),
    "quantized": "quantized",
}


def opened(name: str, folder: Path) -> Target:
    """Return the target of a parser, which uses the folder."""
    return getattr(import_module(f"tests.fuzz.{PARSERS[name]}"), name)(folder)
