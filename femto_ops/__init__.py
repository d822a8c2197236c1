"""Memory-saving autograd functions for language models, the code that installs them, and collectives."""
