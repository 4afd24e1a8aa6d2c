"""SFT rows: many published layouts become one JSON form of messages and tools, checked, capped, mixed and rewritten."""
