"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) and sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198), as a plugin for femto."""
