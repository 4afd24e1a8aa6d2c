"""Engines, which continue token ids: torch (embedded default), vLLM."""
