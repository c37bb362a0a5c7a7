"""All fuzzers by name."""

from collections.abc import Mapping

from tests.fuzz import files, servers, texts
from tests.fuzz.harness import Open
from tests.fuzz.quantized import quantized

PARSERS: Mapping[str, Open] = {
    "http": servers.http,
    "bodies": servers.bodies,
    "frames": servers.frames,
    "template": texts.template,
    "messages": texts.messages,
    "tokenizer": texts.tokenizer,
    "tool-calls": texts.tool_calls,
    "reasoning": texts.reasoning_split,
    "grammar": texts.grammar,
    "events": texts.events,
    "gguf": files.gguf,
    "safetensors": files.safetensors,
    "config": files.config,
    "quantized": quantized,
    "adapter": files.adapter,
    "pack": files.pack,
    "journal": files.journal,
    "results": files.results,
    "batch": files.batch,
    "keys": files.keys,
    "options": files.options,
    "azure": files.azure,
    "mooncake": files.mooncake,
}
