"""`rocstar sandbox bench`: code execution services side by side, ours and others', by one list of programs."""
