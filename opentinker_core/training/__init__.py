"""Training: what computes gradients of policies and steps them."""
