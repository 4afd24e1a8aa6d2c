"""Produces trajectories: environment, episode, collection of a step's groups."""
