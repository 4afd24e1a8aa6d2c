"""One module for each kind of benchmark that brings a scorer of its own."""
