"""Weights as named tensors: dtypes that are sent, names of scales, hashes."""
