"""Supervised fine-tuning on conversations: a plugin for femto that takes over what a row and a batch are."""
