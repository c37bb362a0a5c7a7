"""Processes that tests start, as a context: one that a failing test leaves behind ends, instead of being waited for."""

import subprocess
from typing import Any


class Child(subprocess.Popen):
    """A process that is killed where its context ends by an exception."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)
