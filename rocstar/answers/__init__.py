"""Extract, normalise and compare final answers; killable, three-valued verdicts."""
