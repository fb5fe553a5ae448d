"""Policies, their versions, and the catalog that records them and their lineage."""
