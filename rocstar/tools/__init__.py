"""The Python tools, and tools from functions and MCP servers."""
