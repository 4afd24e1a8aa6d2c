"""Runs untrusted Python: a fork server behind a queue. Independent: no torch, no import from the rest of rocstar."""
