"""Build a pool of training problems: read, filter by named rules, drop repeats and overlaps, account for every row."""
