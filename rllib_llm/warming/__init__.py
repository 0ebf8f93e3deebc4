"""Compiling the kernels of a run before it starts: which they are, in processes side by side, into caches that stay."""
