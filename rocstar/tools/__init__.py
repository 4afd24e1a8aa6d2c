"""The Python tool, and the way to add another."""
