"""Prefect flows and the `opentinker` command line."""

import os

# Torch shares the cores with Prefect's server and MLflow's thread. OpenMP threads that spin while they
# wait take the core from whoever they wait for; this must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
