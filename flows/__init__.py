"""Prefect flows and the `opentinker` command line."""
