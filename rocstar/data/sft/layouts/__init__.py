"""Published layouts of SFT data, one file each. A layout turns one row into conversations; `LAYOUTS` names them.

A layout only reads: whether what it read is a sound conversation is for `check.py` to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rocstar.data.sft.layouts.api_bank import api_bank
from rocstar.data.sft.layouts.base import Layout, Surroundings
from rocstar.data.sft.layouts.bfcl import bfcl
from rocstar.data.sft.layouts.chat import messages, nemotron, pairs
from rocstar.data.sft.layouts.glaive import glaive
from rocstar.data.sft.layouts.magicoder import magicoder
from rocstar.data.sft.layouts.seal_tools import seal_tools
from rocstar.data.sft.layouts.sharegpt import sharegpt
from rocstar.data.sft.layouts.toolace import toolace
from rocstar.data.sft.layouts.toolalpaca import toolalpaca
from rocstar.data.sft.layouts.xlam import xlam

LAYOUTS: Mapping[str, Callable[[Surroundings], Layout]] = {
    "messages": messages,
    "pairs": pairs,
    "nemotron": nemotron,
    "sharegpt": sharegpt,
    "glaive": glaive,
    "toolace": toolace,
    "xlam": xlam,
    "bfcl": bfcl,
    "seal_tools": seal_tools,
    "api_bank": api_bank,
    "toolalpaca": toolalpaca,
    "magicoder": magicoder,
}
