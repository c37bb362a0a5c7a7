"""Run programs on CPUs, as tapes of C++ instructions. Needs the compiled module `ridgeline._native`."""
