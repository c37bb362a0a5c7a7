"""Implement the paged KV cache as block ids. Tensors live in the backends; nothing here imports torch."""
