"""Lists in pages, as OpenAI's API has them."""

from collections.abc import Sequence

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import Response

from ridgeline.core.errors import RequestError


def page(listed: Sequence[tuple[str, object]], query: QueryParams, most: int = 100) -> Response:
    """Return what `limit`, `order` and `after` ask for of objects with their ids, oldest first. Raises RequestError."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {order[:40]!r}", param="order")
    if not limit.isdecimal() or not limit.isascii() or not 1 <= int(limit[:9]) <= most:
        raise RequestError(f"limit must be from 1 to {most}, got {limit[:40]!r}", param="limit")
    found = list(listed) if order == "asc" else list(listed)[::-1]
    if after is not None:
        ids = [name for name, _ in found]
        if after not in ids:
            raise RequestError(f"after names nothing in this list: {after[:100]!r}", param="after")
        found = found[ids.index(after) + 1 :]
    shown = found[: int(limit)]
    ends = {"first_id": shown[0][0] if shown else None, "last_id": shown[-1][0] if shown else None}
    body = {"object": "list", "data": [each for _, each in shown], "has_more": len(found) > len(shown), **ends}
    return Response(msgspec.json.encode(body), media_type="application/json")
