"""Word problems (MAWPS, ASDiv-A, SVAMP): a Task (`data.source = "word_problems:WordProblemTask"`), and the environment
in which their masked form runs (`rollout.environment = "word_problems:GivenEnvironment"`)."""

from word_problems.environment import GivenEnvironment
from word_problems.task import WordProblemTask

__all__ = ["GivenEnvironment", "WordProblemTask"]
