"""One file per general.architecture; see `ridgeline.spec.gguf` for what it holds."""
