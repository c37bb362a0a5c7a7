"""The listening socket, made before anything heavy is imported or loaded: a port that is taken shows at once."""

import socket
import ssl
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ConfigError

_LOOKED_AT = 64  # connections that may have closed, for one that comes when there are too many


class Listener(socket.socket):
    """Bounds how many connections are open, with those in their TLS handshake, which no protocol has heard of."""

    def bound(self, most: int, refused: Callable[[], object]) -> None:
        """Close what comes beyond `most`, and call `refused`."""
        self._most, self._refused, self._accepted = most, refused, deque[socket.socket]()

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if len(self._accepted) >= self._most:
            some = [self._accepted.popleft() for _ in range(min(_LOOKED_AT, self._most))]
            self._accepted += [one for one in some if one.fileno() >= 0]
        self._accepted.append(connection)
        if len(self._accepted) > self._most:
            self._accepted.pop().close()
            self._refused()
            raise ConnectionAbortedError
        return connection, address


def bind(host: str, port: int) -> Listener:
    """Return a bound socket; port 0 takes a free one. Raises OSError.

    Accepted connections inherit TCP_NODELAY: without it, Nagle's algorithm holds back small chunks of a stream.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def bind_unix(path: Path) -> Listener:
    """Return a socket bound to `path`, for this user alone. Raises OSError.

    What a server left there that is gone is replaced; one that replies, or a file of another kind, is not.
    """
    listener = Listener(socket.AF_UNIX)
    try:
        if path.is_socket() and listener.connect_ex(str(path)) != 0:
            path.unlink()
        listener.close()
        listener = Listener(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener


def load_certificate(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Read certificate and key, for the connections to come. Raises ConfigError."""
    try:
        # One that is broken, or of another key, would leave the context without any: another one reads it first.
        for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            each.load_cert_chain(cert, key, password="")  # else a key with a password asks for it on the terminal
    except OSError as error:  # SSLError too
        names = cert if key is None else f"{cert} and {key}"
        raise ConfigError(f"no certificate with its key, in PEM without a password, is in {names}: {error}") from None


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL where clients find it; of a unix socket, its path behind `unix:`."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
