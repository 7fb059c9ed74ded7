"""From what is known (policy, profiles, agents, effects) to what is published, at most once an interval."""
