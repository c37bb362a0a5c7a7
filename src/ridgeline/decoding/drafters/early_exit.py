"""Predict with the model's own first layers, its final norm and its head (LayerSkip, arXiv 2404.16710).

To whatever drafts they are a draft model, with keys and values of their own: those of drafted tokens would have to be
taken back from the model's cache wherever a draft is wrong.
"""

from ridgeline.decoding.drafters.draft import build

__all__ = ["build"]
