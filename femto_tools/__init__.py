"""Commands about runs and plugins rather than runs: verify, memory, hooks; and the harness that tests use."""
