"""What a model does, read from the attempts that a run, an evaluation or a file of transcripts left behind."""
