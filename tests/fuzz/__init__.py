"""Fuzzers of all parsers. What they borrow from other folders of tests is found as pytest finds it."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(_TESTS / name) for name in (".", "weights", "server")]
