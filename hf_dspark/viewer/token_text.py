"""Tokens as text: what each of them adds, and something to look at where that is nothing."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no text yet
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_OVERRIDES = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # of the direction of writing
_VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\xa0": "⍽"}


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """
    The text that each token adds to those before it; together they are the text of all.

    A token that ends in the middle of a character adds nothing, and the one that completes the character adds it.
    """
    texts: list[str] = []
    first = read = 0  # tokens from `first` are decoded together, those before `read` have been given their text
    known = ""
    for end in range(1, len(tokens) + 1):
        text = _decode(tokenizer, tokens[first:end])
        if text.endswith(REPLACEMENT) and end < len(tokens) and end - read < 8:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        first, read = read, end
        known = _decode(tokenizer, tokens[first:read])
    return texts


def vocabulary(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> dict[int, str]:
    """
    The text of tokens inside a text, by id. Bytes that are no text by themselves are written in hexadecimal, as
    `<F0 9F>`.
    """
    opening = tokenizer.encode("a", add_special_tokens=False)[-1:]  # or a leading space would be lost
    before = len(_decode(tokenizer, opening))
    texts = {}
    for token in sorted(set(tokens)):
        text = _decode(tokenizer, [*opening, token])[before:]
        piece = str(tokenizer.convert_ids_to_tokens(token))
        texts[token] = (_bytes(piece) if REPLACEMENT in text else "") or text or piece
    return texts


def visible(text: str) -> str:
    """A token with its whitespace and its control characters to be seen."""
    if len(text) == 1 and unicodedata.category(text) in ("Cf", "Mn", "Me"):  # it would join its neighbour
        return f"U+{ord(text):04X}"
    return "".join(_VISIBLE.get(character) or harmless(character) for character in text) or "∅"


def harmless(text: str) -> str:
    """A text without characters that would steer a terminal or turn the direction of what follows."""
    return "".join(f"U+{ord(character):04X}" if _steers(character) else character for character in text)


def _steers(character: str) -> bool:
    unknown = unicodedata.category(character) in ("Cc", "Cn", "Co", "Zl", "Zp")
    return character in _OVERRIDES or (unknown and character not in "\n\t")


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _bytes(piece: str) -> str:
    """The bytes of a token as a byte-level or a byte-fallback tokenizer keeps it, empty for others."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return f"<{match[1].upper()}>"
    if piece and all(character in _BYTE_OF for character in piece):
        return "<" + bytes(_BYTE_OF[character] for character in piece).hex(" ").upper() + ">"
    return ""
