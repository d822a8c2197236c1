"""Offline data: `femto preprocess` turns text into rows of token ids, and the dataset seat serves those rows."""
