"""Predict with the layer that a model's own checkpoint has for that (arXiv 2412.19437), as an EAGLE head predicts.

What is fed back behind the first drafted token is the model family's to say: `spec.Predictor.returns_normed`.
"""

from ridgeline.decoding.drafters.eagle import build

__all__ = ["build"]
