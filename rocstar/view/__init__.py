"""The local page over run folders (`rocstar view`): reads files, changes none. docs/view.md."""
