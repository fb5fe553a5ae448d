"""Several agents in one environment, several policies in one training: who may act when, and the proof of it.

Free of torch and of any sampler: agents are whatever answers a `Request`.
"""
