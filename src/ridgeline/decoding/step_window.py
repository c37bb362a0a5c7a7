"""Time the steps of a strategy: one by one, or several that are alike together, where they overlap. No clock."""

from statistics import median

MAX_BETWEEN_STEPS_S = 0.001  # rendering and delivery; more, and more than the step, is a pause and no part of it

Shape = tuple[int, int]  # sequences of a step and drafted tokens


class StepWindow:
    """The steps that were begun since `restart`, until which none were: of one shape, or of no use."""

    def __init__(self) -> None:
        self.num_begun = self.num_landed = 0
        self.shape: Shape | None = None  # of those that landed, if all only decode, and alike
        self._began_s = self._landed_s = 0.0
        self._took_s: list[float] = []  # from one landing to the next

    def restart(self, now_s: float) -> None:
        """Start anew with the step that begins."""
        self.num_begun, self.num_landed, self.shape, self._began_s = 1, 0, None, now_s
        self._took_s.clear()

    def stop(self) -> None:
        """Forget all, and what lands from now on."""
        self.num_begun, self.num_landed, self.shape = 0, 0, None

    def land(self, shape: Shape | None, now_s: float) -> None:
        """Take in a step that was computed."""
        self.shape = shape if not self.num_landed or shape == self.shape else None
        self.num_landed += 1
        self._took_s.append(now_s - self._landed_s)
        self._landed_s = now_s

    def step_s(self, now_s: float) -> float:
        """Return what a step took that landed, until now unless nobody wanted one since; of several the median."""
        if self.num_landed > 1:
            return median(self._took_s)
        took_s = self._landed_s - self._began_s
        return took_s if now_s - self._landed_s > max(MAX_BETWEEN_STEPS_S, took_s) else now_s - self._began_s
