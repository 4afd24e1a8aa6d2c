"""Agents of the user's own: programs and functions whose requests to a model become attempts."""
