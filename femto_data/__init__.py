"""Offline data: text in, rows of token ids out; and the dataset seat for rows made that way."""
