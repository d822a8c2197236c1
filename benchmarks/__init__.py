"""Speed and memory beside the peers, as ratios within one run. Not tests: these numbers depend on the machine."""
