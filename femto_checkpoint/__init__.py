"""Checkpoints that load under any other layout, and their export as Hugging Face directories."""
