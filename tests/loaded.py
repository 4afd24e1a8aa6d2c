"""What that process has loaded from which all others are forked (forks.py): what `rocstar train` loads in the end."""

from importlib import import_module

from rocstar.support.child import uncollected

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
    "mcp",
)
with uncollected():
    for name in LOADED:
        import_module(name)
