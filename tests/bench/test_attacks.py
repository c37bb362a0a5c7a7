"""An attack on a server, as the command makes it, for a moment."""

import sys
from functools import partial

from benchmarks.attacks import attacked, disconnects


def test_clients_that_leave_are_counted_and_leave_nothing() -> None:
    attack = partial(disconnects, count=100)
    found = attacked("this", sys.executable, "python-1m", "disconnects", attack).found
    assert 0 < found.pop("aborted") <= 100 and found.pop("free after ms") >= 0
    assert found == {"kv_blocks": 0, "num_requests_running": 0, "num_requests_waiting": 0}
