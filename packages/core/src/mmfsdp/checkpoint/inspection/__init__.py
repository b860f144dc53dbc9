"""Looking at checkpoints: verify, diff, statistics and summaries."""
