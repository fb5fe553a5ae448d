"""Masked token trajectories: turns, the state machine, datums, packing, the store."""
