"""Trained models as entries of the MLflow model registry: what is in one, that it is whole, and how it is loaded.

An entry holds the master weights as a Hugging Face directory, the very bytes that the rollout engine computed with (a
second directory in the standard block-FP8 format where the policy has an FP8 rollout), the precision policy in full,
and a manifest of hashes. `verify` recomputes all of it. Loading it under another policy is refused with the diff.
"""
