"""What a recipe would take on given GPUs, worked out without one: memory, hours, sandbox cores, disk."""
