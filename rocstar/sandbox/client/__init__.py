"""The caller's side: one client over one or many daemons."""
