"""The embedded runtime: workspace (where things are), engine (model, trainer, sampler), session (one run)."""
