"""Zygote, slot, and what runs in the forked process."""
