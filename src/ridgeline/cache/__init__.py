"""The paged KV cache, as block ids: tensors live in the backends; nothing here imports torch."""
