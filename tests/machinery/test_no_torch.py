"""What a model is, costs and keeps is known without torch: importing these packages loads neither it nor transformers.

The import contracts of pyproject.toml say the same of the source; this says it of a running interpreter.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith(sys.argv[1])]))
assert not {"torch", "transformers"} & set(sys.modules)
"""


@pytest.mark.parametrize("package", ["core", "spec", "program", "cost", "cache", "text"])
def test_package_does_without_torch(package):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"ridgeline.{package}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1
