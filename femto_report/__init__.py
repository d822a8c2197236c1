"""Observers of a run: progress, records, plots, samples, sanity checks, logs, traces. Nothing here trains."""
