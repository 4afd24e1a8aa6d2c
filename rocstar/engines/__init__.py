"""Things that continue token ids: scripted (tests, demos) and torch (embedded default)."""
