"""The scripts under benchmarks/ are no part of the package: its tests import them from the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
