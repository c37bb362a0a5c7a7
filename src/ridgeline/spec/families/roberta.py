"""RoBERTa: XLM-RoBERTa of one language."""

from ridgeline.spec.families.xlm_roberta import CLASSIFIER, read, renames

__all__ = ["CLASSIFIER", "read", "renames"]
