"""The episode loop: environments on one side, a sampler on the other, trajectories between."""
