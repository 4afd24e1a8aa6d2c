"""What becomes of published function-calling sets when they are built into SFT rows?

Builds each set of ../shared/data (or of $ROCSTAR_DATA) by itself, with the Qwen2 tokenizer and no length cap, and
reads every built row back: under the templates `paper` and `chat`, the calls parsed from the text the model learns must
be the calls of the row, and the learned tokens must read as that text. Prints a table, the refusals by reason, and last
one JSON line. BFCL and ToolAlpaca are evaluation sets, built here only to measure the layouts.

    python benchmarks/sft_rows.py
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocstar.data.sft.build import ROWS, build
from rocstar.data.sft.check import check_tokens, load_conversations
from rocstar.data.sft.mix import quantiles
from rocstar.data.sft.recipe import MixRecipe
from rocstar.data.sft.render import encoded, pieces
from rocstar.dialogue.calls import parse_calls
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import CHAT, PAPER, ChatMl
from rocstar.protocols import ToolSpec
from rocstar.tools.python import DESCRIPTION, PARAMETERS

TOOL = ToolSpec(name="python", description=DESCRIPTION, parameters=PARAMETERS)
COLUMNS = ("rows in", "conversations", "built", "refused", "calls", "p50", "p95", "max", "read back", "CPU s")
BFCL = [f"{live}{kind}" for live in ("", "live_") for kind in ("multiple", "parallel", "parallel_multiple")]
BFCL += ["simple_python", "live_simple"]


def data_folder() -> Path:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("ROCSTAR_DATA", beside))


def sources(data: Path) -> list[dict[str, Any]]:
    def files(*names: str) -> list[str]:
        return [str(data / f"{name}.jsonl.gz") for name in names]

    seal = files("seal_tools/dev", "seal_tools/test_in_domain", "seal_tools/test_out_domain")
    return [
        {"name": "glaive_toolcall", "layout": "sharegpt", "files": files("glaive_toolcall/en_demo")},
        {"name": "seal_tools", "layout": "seal_tools", "files": seal, "tool_files": files("seal_tools/tool")},
        {"name": "api_bank", "layout": "api_bank", "files": files("api_bank/lv1_lv2_samples")},
        {
            "name": "bfcl",
            "layout": "bfcl",
            "files": files(*(f"bfcl/BFCL_v4_{name}" for name in BFCL)),
            "answer_files": files(*(f"bfcl/possible_answer/BFCL_v4_{name}" for name in BFCL)),
        },
        {
            "name": "toolalpaca",
            "layout": "toolalpaca",
            "files": files("toolalpaca/eval_simulated", "toolalpaca/eval_real"),
        },
    ]


def measure(source: dict[str, Any], tokenizer: Path) -> dict[str, Any]:
    recipe = MixRecipe.model_validate({"source": [source], "mix": {"tokenizer": str(tokenizer)}})
    codec = Codec.load(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        sheet = build(recipe, Path(folder), code_tool=TOOL, environment={}, note=lambda _: None)
        seconds = time.process_time() - started
        rows = Path(folder) / ROWS
        again = {name: read_back(rows, template, codec) for name, template in (("paper", PAPER), ("chat", CHAT))}
    (counted,) = sheet["sources"]
    return {
        "set": source["name"],
        "rows_in": counted["rows_read"],
        "conversations": counted["conversations"],
        "built": counted["built"],
        "refused": counted["refused"],
        "calls_validated": counted["calls_validated"],
        "tokens_chat": counted["tokens"],
        "tokens_paper": quantiles([tokens for _, tokens in again["paper"]]),
        "read_back_paper": sum(same for same, _ in again["paper"]),
        "read_back_chat": sum(same for same, _ in again["chat"]),
        "cpu_seconds": round(seconds, 2),
    }


def read_back(rows: Path, template: ChatMl, codec: Codec) -> list[tuple[bool, int]]:
    """(whether the calls in the learned text are those of the row, tokens) of each built row. Raises Refused where the
    learned tokens do not read as what the assistant writes."""
    results = []
    for conversation in load_conversations(rows, ""):
        parts = list(pieces(conversation, template, conversation.tools or ()))
        row = encoded(parts, codec, template.reserved)
        check_tokens(row, parts, codec)
        learned = [piece.text for piece in parts if piece.learned]
        found = [(call.tool, call.arguments) for text in learned for call in parse_calls(text)]
        meant = [(call.name, call.arguments) for message in conversation.messages for call in message.calls]
        results.append((found == meant, len(row.token_ids)))
    return results


def print_table(measured: Sequence[dict[str, Any]]) -> None:
    print(f"{'set':16}" + "".join(f"{name:>15}" for name in COLUMNS))
    for one in measured:
        refused = sum(one["refused"].values())
        back = f"{one['read_back_paper']}, {one['read_back_chat']}"
        cells = [one["rows_in"], one["conversations"], one["built"], refused, one["calls_validated"]]
        cells += [*one["tokens_chat"].values(), back, one["cpu_seconds"]]
        print(f"{one['set']:16}" + "".join(f"{cell!s:>15}" for cell in cells))
    for one in measured:
        told = ", ".join(f"{reason} {count}" for reason, count in one["refused"].items())
        print(f"{one['set']} refused: {told or 'none'}")


def main() -> None:
    data = data_folder()
    tokenizer = data / "qwen2_tokenizer"
    if not tokenizer.is_dir():
        sys.exit(f"{tokenizer} is absent; set ROCSTAR_DATA to the folder that holds the sets and qwen2_tokenizer")
    measured = [measure(source, tokenizer) for source in sources(data)]
    print_table(measured)
    print(json.dumps({"benchmark": "sft_rows", "sets": measured}))


if __name__ == "__main__":
    main()
