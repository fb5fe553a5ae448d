"""Environments and the protocol they follow. No torch, no model: text in, text and rewards out."""
