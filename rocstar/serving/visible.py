"""What a person reads of a completion while it is written: the text outside tool calls, without the markers that end a
turn, held back where it may become one of them."""

from __future__ import annotations

from collections.abc import Sequence

from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import Template


class VisibleText:
    """The new part of one completion's text after each piece."""

    def __init__(self, codec: Codec, template: Template) -> None:
        self._codec = codec
        self._calls = template.calls
        self._markers = (template.stop, template.calls.reserved[0])
        self._stop = template.stop
        self._shown = 0

    def fresh(self, token_ids: Sequence[int]) -> str:
        """What can be shown more, given all tokens so far."""
        text = self._codec.decode(token_ids)
        ends = [found for marker in self._markers if (found := text.find(marker)) >= 0]
        end = min(ends, default=len(text) - _held(text, self._markers))
        return self._up_to(text, end)

    def rest(self, token_ids: Sequence[int]) -> str:
        """What was held back, once the completion is whole."""
        text = self._codec.decode(token_ids).removesuffix(self._stop)
        shown = self._calls.strip(text)
        return self._up_to(shown, len(shown))

    def _up_to(self, text: str, end: int) -> str:
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh


def _held(text: str, markers: Sequence[str]) -> int:
    """How many last characters may be the beginning of a marker, or of a character that is not whole yet."""
    broken = len(text) - len(text.rstrip("\ufffd"))
    begun = (size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size]))
    return max(broken, max(begun, default=0))
