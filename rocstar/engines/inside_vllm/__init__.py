"""Files that run inside vLLM's environment, where rocstar is not installed: this folder goes on its PYTHONPATH.

They import torch, safetensors, vllm and the standard library only. Importing this package imports none of them."""
