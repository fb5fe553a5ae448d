"""Immutable snapshots of policy states, on local disk or S3."""
