"""Which variants of the kernels run: measured on this machine, its family's defaults, or as asked."""
