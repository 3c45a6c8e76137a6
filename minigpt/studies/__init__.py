"""Experiments that drive training and generation; only scripts import them."""
