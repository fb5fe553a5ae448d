"""Judging a version: confidence intervals over held-out problems, and negative controls."""
