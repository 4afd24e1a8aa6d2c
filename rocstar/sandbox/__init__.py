"""Runs untrusted Python: a fork server behind a queue. Stands alone: no torch, no import from the rest of rocstar."""
