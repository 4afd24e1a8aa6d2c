"""Placement of rocstar's parts on a Ray cluster; the only room that imports Ray (extra `[cluster]`)."""
