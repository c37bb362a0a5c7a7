"""ServerSettings: what the operator chooses about the HTTP side. Built by the command line, read by the server."""

import ipaddress
from dataclasses import dataclass, field

from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Bounds, timeouts and names. `served_model_names` empty: the model's own name. Raises ConfigError.

    `request_timeout_s` counts from arrival to the last token; `stall_timeout_s` is how long a client may leave a
    stream unread.
    """

    served_model_names: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 10 * 2**20
    max_prompts: int = 128
    max_answers: int = 1024  # prompts x n of one request
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompts", "max_answers", "request_timeout_s", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.shutdown_timeout_s < 0:
            raise ConfigError(f"shutdown_timeout_s must not be negative, got {self.shutdown_timeout_s}")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty; give one, or leave the option out")


def require_safe_host(host: str, *, api_key: str | None, insecure_no_auth: bool) -> None:
    """Raises ConfigError for a host that others can reach when nothing asks them for a key."""
    if api_key is None and not insecure_no_auth and not _is_loopback(host):
        raise ConfigError(
            f"host {host} can be reached by others and no API key is set: give --api-key, "
            "or --insecure-no-auth if something in front of the server checks who may use it"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
