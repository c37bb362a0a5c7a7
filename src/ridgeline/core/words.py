"""Write numbers into sentences."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 step, 2,766 steps."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
