"""Runs untrusted Python. Stands alone: the standard library only, no torch, no import from the rest of rocstar."""
