"""Clients: whose a request is, by its key or else its address, what each may ask for, and when it may ask again."""

import hashlib
import math
import time
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException

from ridgeline.core.clock import Clock
from ridgeline.core.errors import ConfigError

MAX_RETRY_AFTER_S = 30.0  # clients of OpenAI's follow Retry-After up to a minute
SMOOTHING = 16  # requests over which times are averaged
MAX_REFUSED = 10_000  # clients whose turns are remembered

Key = Annotated[str, Meta(pattern=r"\S")]
PerMinute = Annotated[int, Meta(ge=1)]


class ClientTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Holds a table of a key file."""

    key: Key | Annotated[list[Key], Meta(min_length=1)]
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None


class Allowance:
    """Counts what may be used in a minute; unused it lasts for a minute, and debts are paid first."""

    def __init__(self, per_minute: int) -> None:
        self.left: float = per_minute
        self.per_minute = per_minute
        self._updated_s = time.monotonic()

    def require(self, what: str, share: float) -> None:
        """Raise HTTPException 429 if nothing is left, or less than this share."""
        now_s, rate = time.monotonic(), self.per_minute / 60
        self.left = min(self.per_minute, self.left + (now_s - self._updated_s) * rate)
        self._updated_s = now_s
        if self.left < (least := max(1.0, share * self.per_minute)):
            wait_s = math.ceil((least - self.left) / rate)
            message = f"this key may use {self.per_minute} {what} a minute; retry in {wait_s} s"
            raise HTTPException(429, message, {"Retry-After": str(wait_s)})


@dataclass(frozen=True, slots=True)
class Client:
    """Names a client; its prefixes in the cache are its own where `salt` is not empty."""

    number: int = 0
    salt: str = ""
    allowances: dict[str, Allowance] = field(default_factory=dict[str, Allowance])  # of requests and tokens

    def begin(self, share: float = 0.0) -> None:
        """Count a request. Raises HTTPException 429 where that, or a token, is more than the client may use.

        `share` of both must be left: a batch leaves them to other requests.
        """
        for what, allowance in self.allowances.items():
            allowance.require(what, share)
        self.use("requests", 1)

    def use(self, what: str, number: int) -> None:
        if what in self.allowances:
            self.allowances[what].left -= number


class Keys:
    """Knows which client a key belongs to. Digests are looked up: the time says nothing about how much was right."""

    def __init__(self, api_key: str | None, file: str | None) -> None:
        self._api_key = api_key
        self._file = file
        self._clients: dict[bytes, Client] = {}
        self.read()

    def read(self) -> None:
        """Read the key file, perhaps again: what was used up stays so. Raises ConfigError, and changes nothing then."""
        clients = {} if self._api_key is None else {_digest(self._api_key): Client()}
        before = {client.salt: client.allowances for client in self._clients.values()}
        for name, table in _tables(self._file).items():
            keys = {_digest(key) for key in ([table.key] if isinstance(table.key, str) else table.key)}
            if not name or keys & clients.keys():
                why = f"{name!r} has a key of another" if name else "a client has no name"
                raise ConfigError(f"the keys in {self._file} cannot be used: {why}")
            per_minute = {"requests": table.requests_per_minute, "tokens": table.tokens_per_minute}
            allowances = {what: Allowance(number) for what, number in per_minute.items() if number is not None}
            for what, allowance in before.get(name, {}).items():
                if what in allowances and allowances[what].per_minute == allowance.per_minute:
                    allowances[what] = allowance
            clients |= dict.fromkeys(keys, Client(_number(f"key {name}"), name, allowances))
        self._clients = clients

    def client_of(self, key: str, address: str) -> Client | None:
        """Return whose request it is; None where a key is needed and this is none."""
        needed = self._api_key is not None or self._file is not None
        return self._clients.get(_digest(key)) if needed else Client(_number(f"address {address}"))

    def background_of(self, name: str) -> Client:
        """Return whose the batches of key `name` are: a client with its limits, and a turn of its own."""
        named = next((client for client in self._clients.values() if client.salt == name), Client(salt=name))
        return replace(named, number=_number(f"batches {name}"))


class Turns:
    """Gives turns to those that are refused: as many come back as requests end, whichever client they are of.

    All being told the same they would come in waves, and nearly all of them in vain.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._period_s = 0.0  # between the ends of two outputs
        self._last_s: dict[int, float] = {}  # by client, its last turn that has been given; the latest given last

    def ended(self, taken_s: float, num_slots: int) -> None:
        """Take in that a request had its slots for `taken_s`, beside `num_slots` in all (Little's law)."""
        self._period_s += (taken_s / num_slots - self._period_s) / SMOOTHING

    def next_s(self, client: int) -> int:
        """Return in how many seconds a client that is refused now may ask again."""
        now_s, last_s = self._clock(), self._last_s
        while last_s and (len(last_s) > MAX_REFUSED or next(iter(last_s.values())) <= now_s):
            del last_s[next(iter(last_s))]
        before_s = max(last_s.pop(client, now_s), now_s)
        last_s[client] = min(before_s + self._period_s * (len(last_s) + 1), now_s + MAX_RETRY_AFTER_S)
        return max(1, math.ceil(last_s[client] - now_s))


def _tables(file: str | None) -> dict[str, ClientTable]:
    try:
        return {} if file is None else msgspec.toml.decode(Path(file).read_bytes(), type=dict[str, ClientTable])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the keys in {file} cannot be read: {error}") from None


def _number(name: str) -> int:
    return zlib.crc32(name.encode())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
