"""The Tinker API, as the official SDK speaks it."""
