"""Real prompts from JSON lines, gzipped or not: {"prompt": text} (HumanEval) or {"turns": [text, ...]} (Spec-Bench)."""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ridgeline.bench.workload import BenchRequest, Workload
from ridgeline.core.errors import ConfigError
from ridgeline.core.options import option


class _Line(msgspec.Struct):
    prompt: str = ""
    turns: list[str] = []
    category: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts(Workload):
    """Prompts in file order, of one `category` if named, at most `num_requests`. Of `turns`, the first is asked."""

    path: str
    num_requests: int = option(100, low=1)
    category: str = ""
    output_tokens: int = option(128, low=1)
    ignore_eos: bool = False

    def requests(self) -> list[BenchRequest]:
        """Read the prompts. Raises ConfigError for an unreadable file, a line without prompt, or an empty category."""
        try:
            data = Path(self.path).read_bytes()
            lines = (gzip.decompress(data) if self.path.endswith(".gz") else data).splitlines()
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"cannot read prompts from {self.path}: {error}") from None
        decoder = msgspec.json.Decoder(_Line)
        texts: list[str] = []
        for number, raw in enumerate(lines, start=1):
            try:
                line = decoder.decode(raw)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{self.path}, line {number}: {error}") from None
            text = line.turns[0] if line.turns else line.prompt
            if not text:
                raise ConfigError(f"{self.path}, line {number}: needs a non-empty `prompt` or `turns`")
            if self.category in ("", line.category):
                texts.append(text)
            if len(texts) == self.num_requests:
                break
        if not texts:
            raise ConfigError(f"{self.path} has no prompts of category {self.category!r}")
        return [BenchRequest(prompt=text, max_tokens=self.output_tokens, ignore_eos=self.ignore_eos) for text in texts]


WORKLOAD = Prompts
