"""Verbs of the rooms that are useful alone, one Typer app each; `rocstar.cli.main` puts them together."""
