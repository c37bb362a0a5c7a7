"""The listening socket, made before anything heavy is imported or loaded: a port that is taken shows at once."""

import socket


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


def url_of(listener: socket.socket) -> str:
    """Return the URL where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
