"""The attempts that runs and evaluations kept: chosen by what became of them, and written in other tools' forms."""
