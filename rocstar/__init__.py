"""rocstar: small language models that learn to reason with a Python tool (GRPO-RoC). Importing it does nothing."""
