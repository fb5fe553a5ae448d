"""Lineage: the report of what trained a version, and its mirror in MLflow, fed from the catalog's outbox."""
