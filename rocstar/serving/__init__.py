"""Talking to a trained agent: on the command line, and as an OpenAI-compatible server whose tool calls run here."""
