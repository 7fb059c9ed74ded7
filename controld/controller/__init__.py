"""The controller: pure functions from policy, profiles and posteriors to decision tables and explanations."""
