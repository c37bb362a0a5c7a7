"""Incremental detokenizer: output token ids in, text deltas out, stop strings found on the way.

One object per output sequence, driven by the engine's front end; the non-streaming text is the same object fed at once,
so the two cannot differ. Must not import torch.

What the text of an output is. With T the tokenizer's own decode, specials skipped or not as asked,

    text(output | prompt) = T(prompt + output) without its longest common prefix with T(prompt).

So a first word keeps the space that T would strip at the start of a text, and a character that the prompt left
unfinished belongs to the output that finishes it. Only the shortest tail of the prompt that starts at a fresh token
is decoded (see `_starts_fresh`), and later only a window: the ids since the last settled boundary, after those that
settled there. A boundary is settled when no later token can change the text before it. Until one is reached the text
is held back, which is what keeps characters whole:

    byte-level BPE   settled after a token that completes a UTF-8 character, or leaves bytes that can never become one;
                     where the decoder does nothing but join bytes, the text is theirs, and no window is decoded
    byte fallback    settled after any token but <0x..>: a run of these is text only if all of it is UTF-8
    anything else    settled after every token
"""

import codecs
from collections.abc import Iterable, Sequence
from itertools import takewhile

from ridgeline.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes the text of one output sequence, as its tokens arrive. Every id is decoded at most three times, whatever
    the length.

    With stop strings, the longest tail that may still become one is held back. The match that is complete first ends
    the text (of those that end together, the one that starts first), however the text is divided among tokens and the
    tokens among calls. The text is cut where the match starts, or where it ends if `include_stop`.

    Attributes:
        stop_found: the stop string that ended the text, or None.
        num_tokens: ids taken so far; feed takes none after the one that completed a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Skip no special tokens of `shown_ids`. A stop string counts only if it ends beyond the text of the first
        `min_tokens - 1` tokens.
        """
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window = self._prompt_tail(prompt_ids)
        self._joins_bytes = tokenizer.joins_bytes and not self._utf8.getstate()[0]
        self._is_open = False  # whether `_utf8` has begun a character, where bytes are joined
        self._unsettled = ""  # text that `_utf8` gave since the last boundary, where bytes are joined
        self._known = "" if self._joins_bytes else tokenizer.decode(self._window, skip_special_tokens=False)
        self._num_known = len(self._window)
        self._matcher = _StopMatcher(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def stop_found(self) -> str | None:
        return None if self._matcher is None else self._matcher.found

    def feed(self, ids: Iterable[int]) -> str:
        """Take output ids, in order; return the text that is now certain. Takes none after a stop string was found."""
        return "".join([self.push(token_id) for token_id in ids])

    def push(self, token_id: int) -> str:
        """Take one output id, as `feed` does."""
        matcher = self._matcher
        if matcher is not None and matcher.found is not None:
            return ""
        self.num_tokens += 1
        text = self._take(token_id)
        return text if matcher is None else matcher.push(text, armed=self.num_tokens >= self._min_tokens)

    def flush(self) -> str:
        """End of the output: return what was held back, unfinished bytes as U+FFFD."""
        if self.stop_found is not None:
            return ""
        rest = self._unsettled + self._utf8.decode(b"", final=True) if self._joins_bytes else self._settle()
        if self._matcher is None:
            return rest
        return self._matcher.push(rest, armed=self.num_tokens >= self._min_tokens) + self._matcher.flush()

    def _take(self, token_id: int) -> str:
        """Append one id to the window; the new text if its end is a settled boundary, else nothing yet."""
        if self._joins_bytes:
            piece = self._tokenizer.piece(token_id)
            if isinstance(piece, str) and not self._is_open:
                return piece
            return "" if token_id in self._skip else self._join(self._tokenizer.token_bytes(token_id))
        if token_id in self._skip or self._tokenizer.token(token_id) is None:
            return ""
        self._window.append(token_id)
        if self._tokenizer.byte_level:
            self._utf8.decode(self._tokenizer.token_bytes(token_id))
            settled = not self._utf8.getstate()[0]
        else:
            settled = not self._tokenizer.is_byte_token(token_id)
        return self._settle() if settled else ""

    def _join(self, token_bytes: bytes) -> str:
        text = self._unsettled + self._utf8.decode(token_bytes)
        self._is_open = bool(self._utf8.getstate()[0])
        self._unsettled = text if self._is_open else ""
        return "" if self._is_open else text

    def _settle(self) -> str:
        """Return the text of the window beyond what is known of it; then keep only the ids that gave this text."""
        if len(self._window) == self._num_known:
            return ""
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        delta = text[_common_length(self._known, text) :]
        del self._window[: self._num_known]
        self._known = self._tokenizer.decode(self._window, skip_special_tokens=False)
        self._num_known = len(self._window)
        return delta

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if token_id in self._skip or self._tokenizer.token(token_id) is None:
                continue
            tail.append(token_id)
            if self._starts_fresh(token_id):
                break
        tail.reverse()
        if self._tokenizer.byte_level:
            for token_id in tail:
                self._utf8.decode(self._tokenizer.token_bytes(token_id))
        return tail

    def _starts_fresh(self, token_id: int) -> bool:
        """Tell whether the text from this token on depends on no earlier byte: no continuation byte, no byte token."""
        if self._tokenizer.byte_level:
            return self._tokenizer.token_bytes(token_id)[:1] not in _CONTINUATION_BYTES
        return not self._tokenizer.is_byte_token(token_id)


_CONTINUATION_BYTES = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))


class _StopMatcher:
    """Passes text on, up to the first stop string to be complete. Invariant: `_held` is the longest tail that is a
    proper prefix of a stop string, so any match still to come starts inside it."""

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        self._stop = tuple(stop)
        self._first_chars = frozenset(text[0] for text in stop)
        self._longest = max(map(len, stop), default=0)
        self._include = include_stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, armed: bool) -> str:
        """Add text; return what no stop string can claim any more. Unarmed, no match may end in `text`."""
        num_old = len(self._held)
        text = self._held + text
        match = self._first_complete(text, num_old) if armed else None
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[: start + len(self.found)] if self._include else text[:start]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _first_complete(self, text: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first after `num_old`; of those ending together, the longest."""
        hits = [(text.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in self._stop]
        ends = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        return min(ends)[1:] if ends else None

    def _hold_from(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_chars:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stop):
                    return start
        return len(text)


def _common_length(known: str, text: str) -> int:
    """Return the length of the common prefix: all of `known`, unless the output ends the prompt's last character."""
    if text.startswith(known):
        return len(known)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, text)))
