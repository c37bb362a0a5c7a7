"""MXFP4: 4-bit floats in groups of 32 that share a power of two, to nearest as `--quantize mxfp4` rounds."""

from ridgeline.compress.methods import rtn

NEEDS_STATISTICS = False
balance = rtn.balance
quantize = rtn.of_scheme("mxfp4")
