"""The run folder: write it, read it, query it."""
