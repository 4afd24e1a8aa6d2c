"""Text <-> token ids over any Hugging Face fast tokenizer. Adds nothing of its own: no BOS, no padding, no cutting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rocstar.dialogue.jinja import chat_template
from rocstar.dialogue.template import template_named
from rocstar.errors import ConfigError


class Codec:
    """A TextCodec that can be saved beside a model."""

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any] | None = None) -> None:
        """`settings` is what tokenizer_config.json holds; `save` keeps it."""
        self._tokenizer = tokenizer
        self._settings = dict(settings or {})
        # A tokenizer.json may come with a length limit or padding switched on; either would change the ids.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def load(cls, folder: Path | str) -> Codec:
        """Read `tokenizer.json` (and `tokenizer_config.json`, if any) of a Hugging Face folder. Raises ConfigError."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json; save a fast tokenizer into it.")
        settings_path = path.with_name("tokenizer_config.json")
        settings = json.loads(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else {}
        return cls(Tokenizer.from_file(str(path)), settings)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included; the model's embedding may be larger."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_id(self, text: str) -> int:
        """The id of a marker. Raises ConfigError when the tokenizer has no single token for it."""
        ids = self.encode(text)
        if len(ids) != 1 or self.decode(ids) != text:
            raise ConfigError(
                f"{text!r} is {len(ids)} tokens in this tokenizer and must be one; "
                "use a tokenizer that has it as a special token."
            )
        return ids[0]

    def save(self, folder: Path | str, template_name: str) -> None:
        """Write tokenizer.json and tokenizer_config.json so that transformers.AutoTokenizer loads them, with the chat
        template of that name and its stop marker as end-of-sequence token. Raises ConfigError."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(target / "tokenizer.json"))
        stop = template_named(template_name).stop
        self.token_id(stop)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": stop, **self._settings}
        settings |= {"eos_token": stop, "chat_template": chat_template(template_name)}
        text = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
        (target / "tokenizer_config.json").write_text(text, encoding="utf-8")
