"""What a model does, read from the attempts that a run or an evaluation left behind."""
