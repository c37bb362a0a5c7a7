"""The listening socket, made before anything heavy is imported or loaded: a port that is taken shows at once."""

import socket
import ssl
from pathlib import Path

from ridgeline.core.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 takes a free one. Raises OSError.

    Accepted connections inherit TCP_NODELAY: without it, Nagle's algorithm holds back small chunks of a stream.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Return a socket bound to `path`, for this user alone. Raises OSError.

    What a server left there that is gone is replaced; one that replies, or a file of another kind, is not.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and listener.connect_ex(str(path)) != 0:
            path.unlink()
        listener.close()
        listener = socket.socket(socket.AF_UNIX)
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
