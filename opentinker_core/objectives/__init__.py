"""Objectives: pure functions from logprobs and a batch's signal to a loss (a sum) and metrics.

Axes: M trained positions of a micro-batch, flattened; N positions of a datum.
"""
