"""bf16 compute with fp32 master weights, as a plugin for femto."""
