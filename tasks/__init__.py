"""Prefect tasks: one module a phase of training."""
