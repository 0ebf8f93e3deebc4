"""Shipped precision policies, installed as `precision_policies.shipped` (package data)."""
