"""The daemon: one queue, the pools of slots, sessions."""
