"""Supervised fine-tuning on conversations: a plugin that brings the dataset of packed rows and the collator."""
