"""A third-party plugin for femto; the hooks are in plugin.py."""
