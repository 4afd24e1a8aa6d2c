"""rocstar: small language models that learn to reason with a Python tool (GRPO-RoC). Importing it does nothing."""

__version__ = "0.1.0"
