"""What that process has loaded from which all others are forked (forks.py): what `rocstar train` loads in the end."""

import logging
import sys
from importlib import import_module

from rocstar.support.child import uncollected

LOADED = (
    "pytest",
    "rocstar.cli.main",
    "rocstar.cluster",
    "rocstar.train",
    "rocstar.run.material",
    "rocstar.record.trackers",
    "rocstar.engines.vllm_server",
    "rocstar.answers.judge",
    "transformers.conversion_mapping",
    "transformers.models.qwen3.modeling_qwen3",
    "pyarrow.parquet",
    "pandas",
    "mcp",
)
with uncollected():
    for name in LOADED:
        import_module(name)
    # What every judge, command and learner would build anew: grammars, options, how checkpoints name weights.
    sys.modules["rocstar.answers.judge"].warm()
    sys.modules["rocstar.cli.main"].click_command()
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("")
logging.disable(logging.NOTSET)  # what it sets for its own process alone
sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
