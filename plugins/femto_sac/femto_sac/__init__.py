"""Activation checkpointing: full, selective, or to a memory budget, as a plugin for femto."""
