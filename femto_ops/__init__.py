"""Autograd functions that save less and compute the same, and what puts them into a Hugging Face model."""
