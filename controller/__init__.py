"""The learned width controller: predictor, policy, latency profile, checkpoint."""
