"""femto: a microkernel for training decoder-only language models; everything else is a plugin."""
