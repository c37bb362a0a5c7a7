"""The clock of the engine: what it measures, plans and waits by. A simulation or a test passes its own."""

from collections.abc import Callable

Clock = Callable[[], float]  # monotonic seconds
