"""Model files in and out: folders, safetensors, and the way from checkpoint tensors to program weights."""
