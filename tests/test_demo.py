"""The demonstration shows every draft once, and without it the text is the answer."""

from __future__ import annotations

import torch

from hf_dspark.demo import compared, marked
from hf_dspark.generation.trace import Round


def test_marks_without_colours(tokenizer):
    answer = tokenizer("abcdefg").input_ids
    rounds = [Round(tokenizer("bcx").input_ids, [], 2), Round([], [], 0), Round(tokenizer("fg").input_ids, [], 2)]
    text = marked(rounds, answer, tokenizer, colour=False)
    assert text.plain == "a{bc}[x]de{fg}"


def test_marks_with_colours(tokenizer):
    answer = tokenizer("abcd").input_ids
    text = marked([Round(tokenizer("bx").input_ids, [], 1)], answer, tokenizer, colour=True)
    assert text.plain == "abxc"
    assert [(text.plain[span.start : span.end], str(span.style)) for span in text.spans] == [
        ("a", "bold"),
        ("b", "green"),
        ("x", "red strike"),
        ("c", "bold"),
    ]


def test_only_rounding_excuses_a_difference():
    assert compared([1, 2, 3], [1, 2, 3], torch.bfloat16) == compared([1], [1], torch.float32) == "equal"
    assert compared([1, 2, 3], [1, 2, 4], torch.float32) == "DIFFER"
    assert "the same for 2 tokens" in compared([1, 2, 3], [1, 2, 4], torch.bfloat16)
    assert "the same for 2 tokens" in compared([1, 2, 3], [1, 2], torch.bfloat16)
