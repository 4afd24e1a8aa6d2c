"""Chat template, tool-call syntax, prompts: messages <-> token ids, append only."""
