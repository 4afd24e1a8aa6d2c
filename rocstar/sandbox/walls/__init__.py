"""What keeps a program inside: namespaces, file system, system-call filter, control groups."""
