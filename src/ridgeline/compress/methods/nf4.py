"""NF4: quantiles of a normal distribution in blocks of 64, to nearest, in a folder as bitsandbytes writes it."""

from ridgeline.compress.methods import rtn

NEEDS_STATISTICS = False
balance = rtn.balance
quantize = rtn.of_scheme("nf4")
