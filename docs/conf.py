"""How Sphinx reads the pages. They are plain Markdown that a forge shows as well; nothing here changes their meaning.

The source folder is the repository's root: pages link to the README, to examples and to source files where they lie.
Build: `scripts/docs`."""

project = "rocstar"
author = "the rocstar authors"
extensions = ["myst_parser"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["README.md", "CHANGELOG.md", "LOG.md", "docs/**", "examples/*/README.md"]
exclude_patterns = [".*", "build", "docs/_build"]
"""Folders that are not even walked: the three environments of the tests hold 200,000 files."""
suppress_warnings = ["toc.empty_glob"]

myst_heading_anchors = 4
"""Anchors of headings are those of a forge."""

html_theme = "furo"
html_title = "rocstar"
html_copy_source = False
html_show_sphinx = False
pygments_style = "default"
