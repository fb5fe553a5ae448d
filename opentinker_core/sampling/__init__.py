"""Samplers: what generates tokens from a pinned policy version."""
