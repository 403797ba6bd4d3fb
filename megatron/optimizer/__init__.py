"""Parameter groups, learning-rate schedule and batch-size schedule."""
