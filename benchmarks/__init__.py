"""Side-by-side measurements; each prints a table, or with --json one object with `ratios`."""
