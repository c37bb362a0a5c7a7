"""Pitfalls that other engines fell into: a check for each by its number, and bugs that are planted to see it fail.

A check compares with what was found before, so it is run as it is, which also finds what to compare with, and once with
each bug. `World.once` is what remembers. Engines are built anew each time: a planted bug leaves its traces in them.
"""

import pytest


class World:
    """What checks remember between two runs, and the folders that they work in."""

    def __init__(self, folder, shared_data):
        self.folder, self.shared_data, self._found = folder, shared_data, {}

    def once(self, key, find):
        """What `find` returns, of the first time."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


class Pitfalls:
    """The checks and the bugs of a file."""

    def __init__(self):
        self.checks, self.bugs = {}, {}

    def check(self, number):
        """Register a function of a World that raises AssertionError where an engine falls into the pitfall."""

        def register(function):
            self.checks[number] = function
            return function

        return register

    def bug(self, number, what):
        """Register a function of a MonkeyPatch that plants the bug `what`."""

        def register(function):
            self.bugs[number, what] = function
            return function

        return register

    def tests(self):
        """A test that runs every check in a fixture `world`, and one that plants every bug."""
        checks = [pytest.param(check, id=f"{number}-{check.__name__}") for number, check in self.checks.items()]
        bugs = [
            pytest.param(self.checks[number], bug, id=f"{number}-{what}") for (number, what), bug in self.bugs.items()
        ]

        @pytest.mark.parametrize("check", checks)
        def test_pitfall(check, world):
            as_it_is(check, world)

        @pytest.mark.parametrize(("check", "bug"), bugs)
        def test_a_planted_bug_is_caught(check, bug, world, monkeypatch):
            assert is_caught(check, bug, world, monkeypatch)

        return test_pitfall, test_a_planted_bug_is_caught


def as_it_is(check, world):
    """Run a check without a bug, unless it has passed in this world."""
    world.once(check, lambda: check(world))


def is_caught(check, bug, world, monkeypatch):
    """Run a check as it is, then with a bug; tell whether that was noticed."""
    as_it_is(check, world)
    bug(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        check(world)
    return caught
