"""Lines of a batch: what each asks for, what came of it, and which of a file are left to do.

An input is read once to check it, and once more while it runs: in memory are 8 bytes of each line's name, and 8 of
what it asks.
"""

import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, Raw, UnsetType

Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score"]
MAX_TOLD = 100  # problems of one input
DUPLICATE = "duplicate_custom_id"
_ID, _HEX = "batch_req_", re.compile("[0-9a-f]{16}")


class Line(msgspec.Struct, kw_only=True):
    """A request of a batch; `body` is what would be posted to `url`."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Url
    body: Raw


class Problem(msgspec.Struct, kw_only=True):
    """Tells why a line cannot run, or did not."""

    code: str
    message: str
    line: int | UnsetType = UNSET
    param: str | UnsetType = UNSET


class LineResponse(msgspec.Struct, kw_only=True):
    """Holds what an endpoint responded."""

    status_code: int
    request_id: str
    body: Raw


class Result(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of the output: a response, or why there is none."""

    id: str = msgspec.field(default_factory=lambda: f"{_ID}{uuid4().hex}")
    custom_id: str | None
    response: LineResponse | None = None
    error: Problem | None = None

    @property
    def asked(self) -> int:
        """The digest of what the line asked for, where the id has it."""
        digits = self.id.removeprefix(_ID)[16:]
        return int(digits, 16) if _HEX.fullmatch(digits) else 0

    @property
    def key(self) -> int:
        """The digest of the line's name, or of its number where it has no name that could be read."""
        nameless = self.error is not None and self.custom_id is None
        return _key(f"#{self.error.line}" if self.error and nameless else f"={self.custom_id}")

    @property
    def is_ok(self) -> bool:
        return self.response is not None and self.response.status_code < 300


class _Asked(msgspec.Struct):
    stream: Any = None


class _Used(msgspec.Struct):
    usage: dict[str, Any] = {}


_USED = msgspec.json.Decoder(_Used)
_INPUT, _OUTPUT = (
    ("input_tokens_details", "prompt_tokens_details"),
    ("output_tokens_details", "completion_tokens_details"),
)
_LINE, _ASKED = msgspec.json.Decoder(Line), msgspec.json.Decoder(_Asked)


class Usage(msgspec.Struct):
    """Sums the tokens of results, in the words of responses."""

    input_tokens: int = 0
    input_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"cached_tokens": 0})
    output_tokens: int = 0
    output_tokens_details: dict[str, int] = msgspec.field(default_factory=lambda: {"reasoning_tokens": 0})
    total_tokens: int = 0

    def add(self, result: Result) -> None:
        """Add the tokens of a result, where it has some."""
        used: dict[str, Any] = {}
        with suppress(msgspec.MsgspecError):
            used = {} if result.response is None else _USED.decode(result.response.body).usage
        new, old = used.get("input_tokens", used.get("prompt_tokens", 0)), used.get("completion_tokens", 0)
        self.input_tokens += new
        self.output_tokens += used.get("output_tokens", old)
        self.total_tokens += used.get("total_tokens", 0)
        for sums, names in ((self.input_tokens_details, _INPUT), (self.output_tokens_details, _OUTPUT)):
            found = next((used[name] for name in names if name in used), {})
            for name in sums:
                sums[name] += found.get(name, 0)


@dataclass
class Work:
    """The lines of a file, each to be done once; `done_N` says which are."""

    path: Path
    max_line_bytes: int
    url: str | None  # what all must ask for; None: each its own
    keys_N: npt.NDArray[np.uint64]
    asked_N: npt.NDArray[np.uint64]  # digests of the lines, and of what else decides their results
    done_N: npt.NDArray[np.bool_]
    problems: list[Problem]  # the first of them
    duplicates: list[Problem]

    @classmethod
    def read(cls, path: Path, max_line_bytes: int, url: str | None = None, options: str = "") -> Self:
        """Check every line. `options` are what decides results beside the lines. Raises OSError."""
        keys, asked, blank, problems = array("Q"), array("Q"), array("B"), list[Problem]()
        for number, line, raw in _lines(path, max_line_bytes, url):
            asked.append(_digest(options.encode() + b"\n" + raw.strip()))
            blank.append(line is None)
            keys.append(_key(f"={line.custom_id}" if isinstance(line, Line) else f"#{number}"))
            if isinstance(line, Problem) and len(problems) < MAX_TOLD:
                problems.append(line)
        keys_N = np.array(keys, np.uint64)
        order_N = np.argsort(keys_N, kind="stable")
        again = np.flatnonzero(np.diff(keys_N[order_N]) == 0)[:MAX_TOLD]
        pairs = sorted((int(order_N[i + 1]) + 1, int(order_N[i]) + 1) for i in again)
        duplicates = [
            Problem(code=DUPLICATE, message=f"line {n} has the custom_id of line {m}", line=n, param="custom_id")
            for n, m in pairs
        ]
        return cls(
            path,
            max_line_bytes,
            url,
            keys_N,
            np.array(asked, np.uint64),
            np.array(blank, np.bool_),
            problems,
            duplicates,
        )

    @property
    def num_left(self) -> int:
        return len(self.done_N) - int(self.done_N.sum())

    def skip(self, keys: "array[int]") -> bool:
        """Mark what was done before, by the keys of results; False where some are of no line of this input."""
        found_K = np.array(keys, np.uint64)
        self.done_N |= np.isin(self.keys_N, found_K)
        return bool(np.isin(found_K, self.keys_N).all())

    def changed(self, keys: "array[int]", asked: "array[int]") -> list[int]:
        """Return the numbers of the lines whose results, found by `skip`, are of something else than they ask."""
        order_N = np.argsort(self.keys_N)
        lines_K = order_N[np.searchsorted(self.keys_N, np.array(keys, np.uint64), sorter=order_N)]
        return sorted((lines_K[self.asked_N[lines_K] != np.array(asked, np.uint64)] + 1).tolist())

    def result_id(self, index: int) -> str:
        """Return the id of a line's result: its name and what it asks, as digests."""
        return f"{_ID}{self.keys_N[index]:016x}{self.asked_N[index]:016x}"

    def left(self) -> Iterator[tuple[int, Line | Problem]]:
        """Yield what is not done, with the index that `done_N` has of it."""
        for number, line, _ in _lines(self.path, self.max_line_bytes, self.url):
            if line is not None and not self.done_N[number - 1]:
                yield number - 1, line


def _lines(path: Path, max_bytes: int, url: str | None) -> Iterator[tuple[int, Line | Problem | None, bytes]]:
    """Yield the lines with their numbers, None for a blank one, and their bytes, of a long one the first."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_bytes + 1):
            number += 1
            if len(raw) > max_bytes and not raw.endswith(b"\n"):
                while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                    pass
                yield number, _problem(number, "line_too_long", f"longer than {max_bytes} bytes"), raw
            else:
                yield number, _parsed(number, raw, url) if raw.strip() else None, raw


def _parsed(number: int, raw: bytes, url: str | None) -> Line | Problem:
    try:
        line = _LINE.decode(raw)
        if _ASKED.decode(line.body).stream:
            return _problem(number, "invalid_request", "a batch cannot stream: leave stream out")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _problem(number, "invalid_json_line", str(error))
    if url is not None and line.url != url:
        return _problem(number, "mismatched_url", f"the batch is for {url}, the line for {line.url}")
    return line


def _problem(number: int, code: str, what: str) -> Problem:
    return Problem(code=code, message=f"line {number}: {what}", line=number)


def _key(name: str) -> int:
    return _digest(name.encode())


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
