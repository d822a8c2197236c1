"""Checkpoints that load under any layout, and their export as Hugging Face directories."""
