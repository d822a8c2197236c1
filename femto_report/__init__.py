"""What people look at: progress, records, plots, samples, sanity checks. Observers only: nothing here trains."""
