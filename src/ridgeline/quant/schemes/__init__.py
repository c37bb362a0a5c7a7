"""One file per scheme; see `ridgeline.quant.scheme.Scheme` for what it holds."""
