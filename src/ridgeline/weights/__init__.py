"""Read and write models: folders, safetensors, and the way from checkpoint tensors to program weights."""
