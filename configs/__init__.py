"""Shipped experiment configurations, installed as `rllib_llm.shipped_configs` (package data)."""
