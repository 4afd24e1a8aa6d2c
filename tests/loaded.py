"""What a process has loaded from which the commands of tests are forked: what a `rocstar train` loads in the end."""

import gc
from importlib import import_module

LOADED = (
    "pytest",
    "rocstar.cli.main",
    "rocstar.cli.launch",
    "rocstar.train",
    "rocstar.run.material",
    "rocstar.record.trackers",
    "rocstar.engines.vllm_server",
    "transformers.models.qwen3.modeling_qwen3",
    "pyarrow.parquet",
    "pandas",
)
gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time
for name in LOADED:
    import_module(name)
gc.freeze()
gc.enable()
