"""Clients: whose a request is, by its key or else its address, and what each may ask for.

A key file is TOML, one table a client; docs/howto/serve.md shows one.
"""

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

from ridgeline.core.errors import ConfigError

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
        self._per_minute = per_minute
        self._updated_s = time.monotonic()

    def require(self, what: str) -> None:
        """Raise HTTPException 429 if nothing is left."""
        now_s, rate = time.monotonic(), self._per_minute / 60
        self.left = min(self._per_minute, self.left + (now_s - self._updated_s) * rate)
        self._updated_s = now_s
        if self.left < 1:
            wait_s = math.ceil((1 - self.left) / rate)
            message = f"this key may use {self._per_minute} {what} a minute; retry in {wait_s} s"
            raise HTTPException(429, message, {"Retry-After": str(wait_s)})


@dataclass(frozen=True, slots=True)
class Client:
    """Names a client; its prefixes in the cache are its own where `salt` is not empty."""

    number: int = 0
    salt: str = ""
    allowances: dict[str, Allowance] = field(default_factory=dict[str, Allowance])  # of requests and tokens

    def begin(self) -> None:
        """Count a request. Raises HTTPException 429 where that, or a token, is more than the client may use."""
        for what, allowance in self.allowances.items():
            allowance.require(what)
        self.use("requests", 1)

    def use(self, what: str, number: int) -> None:
        if what in self.allowances:
            self.allowances[what].left -= number


class Keys:
    """Knows which client a key belongs to. Digests are looked up: the time says nothing about how much was right."""

    def __init__(self, api_key: str | None, file: str | None) -> None:
        self._api_key = api_key
        self._file = file
        self.read()

    def read(self) -> None:
        """Read the key file, perhaps again. Raises ConfigError, and changes nothing then."""
        clients = {} if self._api_key is None else {_digest(self._api_key): Client()}
        for name, table in _tables(self._file).items():
            per_minute = {"requests": table.requests_per_minute, "tokens": table.tokens_per_minute}
            allowances = {what: Allowance(number) for what, number in per_minute.items() if number is not None}
            client = Client(_number(f"key {name}"), name, allowances)
            clients |= {_digest(key): client for key in ([table.key] if isinstance(table.key, str) else table.key)}
        self._clients = clients

    def client_of(self, key: str, address: str) -> Client | None:
        """Return whose request it is; None where a key is needed and this is none."""
        needed = self._api_key is not None or self._file is not None
        return self._clients.get(_digest(key)) if needed else Client(_number(f"address {address}"))

    def background_of(self, name: str) -> Client:
        """Return whose the batches of key `name` are: a client with its limits, and a turn of its own."""
        named = next((client for client in self._clients.values() if client.salt == name), Client(salt=name))
        return replace(named, number=_number(f"batches {name}"))


def _tables(file: str | None) -> dict[str, ClientTable]:
    try:
        return {} if file is None else msgspec.toml.decode(Path(file).read_bytes(), type=dict[str, ClientTable])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the keys in {file} cannot be read: {error}") from None


def _number(name: str) -> int:
    return zlib.crc32(name.encode())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
