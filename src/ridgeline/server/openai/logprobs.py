"""Log-probabilities in the shapes of the two APIs.

A token whose bytes are no whole characters is spelled "bytes:\\xe2\\x96", as OpenAI does, so that two such tokens never
share a name.
"""

import codecs
from collections.abc import Iterable, Sequence, Set

from ridgeline.core.step import TokenLogprob
from ridgeline.server.openai import protocol
from ridgeline.text.outputs import BlockReader, OutputFormat, Step
from ridgeline.text.tokenizer import Tokenizer

LOWEST = -9999.0  # what OpenAI writes for a token that cannot be chosen; JSON has no infinity


class TokenNames:
    """Spells tokens; without a tokenizer, or `as_ids`, "token_id:17"."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self.special_ids = frozenset[int]() if tokenizer is None else tokenizer.special_ids  # a text may lack them

    def raw(self, token_id: int) -> bytes:
        """Return the token's bytes inside a text."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        raw = self.raw(token_id)
        if not raw or self._as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob]) -> protocol.ChatLogprobs:
    """Return one entry per token, in order."""

    def spelled(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return names.name(token_id), max(logprob, LOWEST), list(names.raw(token_id))

    content: list[protocol.ChatTokenLogprob] = []
    for entry in logprobs:
        top = [protocol.TopLogprob(*spelled(*each)) for each in entry.top]
        content.append(protocol.ChatTokenLogprob(*spelled(entry.token_id, entry.logprob), top))
    return protocol.ChatLogprobs(content)


def prompt_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob | None]) -> protocol.PromptLogprobs:
    """Return candidates by token id; the first prompt token has none."""
    positions: protocol.PromptLogprobs = []
    for entry in logprobs:
        if entry is None:
            positions.append(None)
            continue
        ranks = {token_id: (value, rank) for rank, (token_id, value) in enumerate(entry.top, start=1)}
        ranks[entry.token_id] = (entry.logprob, entry.rank)
        found: dict[str, protocol.PromptLogprob] = {}
        for token_id, (value, rank) in ranks.items():
            found[str(token_id)] = protocol.PromptLogprob(max(value, LOWEST), rank, names.name(token_id))
        positions.append(found)
    return positions


class ContentLogprobs:
    """Takes the tokens of one output -> the entries of those that are content, block by block.

    What it finds depends on the tokens alone, and not on how they are cut into deltas.
    """

    def __init__(self, names: TokenNames, form: OutputFormat, shown_ids: Set[int]) -> None:
        self._names, self._hidden_ids = names, names.special_ids - shown_ids
        self._reader = BlockReader(form)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[protocol.ChatTokenLogprob] = []
        self._blocks: list[list[protocol.ChatTokenLogprob]] = []
        self._block, self._num_told = -1, 0  # the one that is told of, and how many of its entries were

    def feed(self, logprobs: Iterable[TokenLogprob], *, last: bool) -> None:
        """Take the next tokens; `last`: nothing follows."""
        for entry in logprobs:
            self._pending += chat_logprobs(self._names, [entry]).content
            is_hidden = entry.token_id in self._hidden_ids
            self._take("" if is_hidden else self._utf8.decode(self._names.raw(entry.token_id)))
        if last:
            self._take("", last=True)

    def of(self, step: Step) -> Sequence[protocol.ChatTokenLogprob]:
        """Return the entries that a step of content adds, when it ends all."""
        if step.what == "begin":
            self._block, self._num_told = self._block + 1, 0
            return []
        found = self._blocks[self._block] if self._block < len(self._blocks) else []
        told, self._num_told = 0 if step.what == "end" else self._num_told, len(found)
        return found[told:]

    def _take(self, text: str, *, last: bool = False) -> None:
        for step in self._reader.feed(text, last=last):
            if step.kind != "content":  # what began another block is its own, unless it is the token at hand
                del self._pending[: len(self._pending) - (step.what == "end")]
            elif step.what == "begin":
                self._blocks.append([])
            elif step.what == "more":
                self._blocks[-1] += self._pending
                self._pending = []


class CompletionLogprobsWriter:
    """Builds the aligned lists of one output, at once or chunk by chunk.

    `text_offset` counts characters of the output's tokens; a character that several tokens share is at the offset of
    the first of them. Special tokens that `skip_special` leaves out of the text take no room.
    """

    def __init__(self, names: TokenNames, *, with_top: bool, skip_special: bool) -> None:
        self._names = names
        self._with_top = with_top
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def start(self, text: str, token_ids: Iterable[int]) -> None:
        """Start the output with `text`, which may lack the space that its first token would have inside a text."""
        raw = b"".join(self._names.raw(token_id) for token_id in token_ids if not self._left_out(token_id))
        if text and raw.startswith(b" ") and not text.startswith(" "):
            self._offset = -1

    def write(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> protocol.CompletionLogprobs:
        """Write the next tokens; None for a token that nothing predicted."""
        lists = protocol.CompletionLogprobs([], [], [], [] if self._with_top else None)
        for token_id, entry in tokens:
            lists.text_offset.append(max(0, self._offset))
            lists.tokens.append(self._names.name(token_id))
            lists.token_logprobs.append(None if entry is None else max(entry.logprob, LOWEST))
            if lists.top_logprobs is not None:
                lists.top_logprobs.append(None if entry is None else self._top(entry))
            if not self._left_out(token_id):
                self._offset += len(self._utf8.decode(self._names.raw(token_id)))
        return lists

    def _left_out(self, token_id: int) -> bool:
        return self._skip_special and token_id in self._names.special_ids

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the likely tokens and, like OpenAI, the chosen one; the likeliest of those that are spelled alike."""
        pairs = sorted((*entry.top, (entry.token_id, entry.logprob)), key=lambda pair: pair[1])
        return {self._names.name(token_id): max(value, LOWEST) for token_id, value in pairs}
