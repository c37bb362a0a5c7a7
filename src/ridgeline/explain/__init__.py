"""What an inference costs at least, and why: the numbers of lectures recomputed. Must not import torch."""
