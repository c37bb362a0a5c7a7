"""The native CPU backend: the program as a tape of C++ instructions. Needs the compiled module `ridgeline._native`."""

from ridgeline.backends.native.executable import NativeExecutable
from ridgeline.backends.native.settings import MatrixFormat, NativeSettings

__all__ = ["MatrixFormat", "NativeExecutable", "NativeSettings"]
