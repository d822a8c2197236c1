"""ZeRO stages 1, 2 and 3 (Rajbhandari et al. 2020, arXiv:1910.02054), as plugins for femto."""
