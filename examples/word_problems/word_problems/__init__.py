"""Word problems (MAWPS, ASDiv-A, SVAMP) as a Task: `data.source = "word_problems:WordProblemTask"`."""

from word_problems.task import WordProblemTask

__all__ = ["WordProblemTask"]
