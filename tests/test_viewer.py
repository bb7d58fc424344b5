"""What a drafter did: recorded, kept, aligned, shown."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch
from conftest import prompt, scripted_drafter, tiny_drafter, tiny_target
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typer.testing import CliRunner

from hf_dspark.cli import app
from hf_dspark.evaluation.variants import as_configured, head_off
from hf_dspark.generation.trace import Details, Round, Seconds
from hf_dspark.viewer import terminal
from hf_dspark.viewer.alignment import align, common_tokens, verdict
from hf_dspark.viewer.page import html, write_page
from hf_dspark.viewer.recording import Recording, as_json, load, record, save
from hf_dspark.viewer.token_text import pieces, visible, vocabulary

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} <!-- &amp; "
TEXT = f"{HOSTILE}\n\tשלום עולם, مرحبا 🙂👩‍👩‍👧 a\u202eb  \u2028 end"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that every character beyond ASCII is several."""
    characters = bytes_to_unicode()
    backend = Tokenizer(models.BPE({characters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def recording(text: str, sizes: tuple[int, ...] = (3, 0, 2), slots: int = 4, **fields) -> Recording:
    """A recording of a text whose rounds accept `sizes` tokens in turn, reject one more if any, and cut one."""
    answer, rounds, place = list(text.encode()), [], 0
    while place + 1 < len(answer):
        accepted = min(sizes[len(rounds) % len(sizes)], len(answer) - place - 2)
        draft = answer[place + 1 : place + 1 + accepted]
        token = answer[place + 1 + accepted]
        if accepted:
            draft = [*draft, (token + 1) % 128]
        drafted = [*draft, 35]
        choices = [[(each, 0.75), ((each + 1) % 256, 0.25)] for each in drafted]
        verdicts = [[(each, 0.5), (token, 0.25)] for each in [*draft, token]]
        details = Details(10 + place, drafted, [0.5] * len(drafted), choices, verdicts, token)
        seconds = Seconds(0.001, 0.002, 0.01, 0.0005)
        rounds.append(Round(draft, [0.5] * len(draft), accepted, False, seconds, details=details))
        place += accepted + 1
    tokenizer = byte_tokenizer()
    names = {"target": "some/target", "drafter": "a drafter", "prompt": "What?", "slots": slots + 2, **fields}
    return Recording.of(rounds, [0] * 10 + answer, tokenizer, **names)


def generated(do_sample: bool = False, alternatives: int = 3, **fields):
    target = tiny_target("llama")
    inputs = prompt(7)
    script = target.generate(inputs, do_sample=False, max_new_tokens=24)[0]
    drafter = tiny_drafter(target) if do_sample else scripted_drafter(target, script, **fields)
    torch.manual_seed(3)
    with drafter.trace(alternatives=alternatives) as rounds:
        arguments = {"do_sample": do_sample, "max_new_tokens": 24}
        sequence = target.generate(inputs, assistant_model=drafter, **arguments)[0]
    return target, drafter, rounds, sequence


def test_details_say_what_drafter_and_target_thought():
    target, _, rounds, sequence = generated()
    place = 7
    assert any(each.accepted for each in rounds) and any(each.accepted < len(each.draft) for each in rounds)
    for each in rounds:
        details = each.details
        assert details.anchor == place
        assert details.drafted == each.draft
        assert [some[0][0] for some in details.drafter] == each.draft  # greedy: the most likely is drafted
        text = torch.cat([sequence[: place + 1], torch.tensor(each.draft, dtype=torch.long)])
        with torch.no_grad():
            expected = target(text[None]).logits[0, place:].softmax(-1)
        assert len(details.target) == len(each.draft) + 1
        for some, p in zip(details.target, expected):
            assert dict(some) == pytest.approx({token: p[token].item() for token, _ in some}, abs=1e-4)
            assert some[0][0] == p.argmax()
        for k, token in enumerate(each.draft):
            assert token in dict(details.target[k])  # however unlikely
        assert details.token == sequence[place + each.accepted + 1]
        place += each.accepted + 1


def test_a_plain_trace_has_no_details_and_changes_nothing():
    *_, rounds, plain = generated(do_sample=True, alternatives=0)
    *_, detailed, sequence = generated(do_sample=True)
    assert sequence.tolist() == plain.tolist()
    assert [(each.draft, each.accepted) for each in rounds] == [(each.draft, each.accepted) for each in detailed]
    assert all(each.details is None for each in rounds)


def test_time_of_the_details_is_not_the_rounds(monkeypatch):
    from hf_dspark.generation import trace

    now = [0.0]
    monkeypatch.setattr(trace.time, "perf_counter", lambda: now[0])
    clock = trace.Clock([], running=True)
    now[0] += 1
    with clock.stopped():
        now[0] += 10
    now[0] += 2
    clock.lap("head")
    assert clock.seconds.head == clock.elapsed() == 3


def test_a_trace_inside_a_trace_ends_alone():
    drafter = tiny_drafter(tiny_target("llama"))
    with drafter.trace() as outer:
        with pytest.raises(KeyError), drafter.trace(alternatives=2):
            raise KeyError
        assert drafter.rounds is outer and drafter.alternatives == 0
    assert drafter.rounds is None


def test_cut_drafts_are_recorded(monkeypatch):
    from hf_dspark.scheduling.schedulers import FixedLength

    monkeypatch.setattr(FixedLength, "keep", lambda self, drafted: min(drafted, 1))
    *_, rounds, _ = generated()
    assert all(len(each.details.drafted) > 1 for each in rounds[:-2])
    assert all(each.draft == each.details.drafted[:1] for each in rounds)
    assert terminal.fates(rounds[0])[1:] == ["cut"] * (len(rounds[0].details.drafted) - 1)


def test_round_trip(tmp_path):
    first, second = recording(TEXT), recording(TEXT, (1,), method="other")
    save([first, second], tmp_path / "trace.json")
    assert load(tmp_path / "trace.json") == [first, second]
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda c: c.update(format="else"), "its `format` is not"),
        (lambda c: c.update(version=2), "its version is 2, this package reads 1"),
        (lambda c: c.update(recordings=[]), "it holds no recording"),
        (lambda c: c["recordings"][0].pop("answer"), "it lacks 'answer'"),
        (lambda c: c["recordings"][0]["answer"].append(1), "the answer has"),
        (lambda c: c["recordings"][0].update(prompt=3), "should be a text"),
        (lambda c: c["recordings"][0].update(prompt="\ud800"), "surrogates"),
        (lambda c: c["recordings"][0].update(slots=1), "drafts more than 1"),
        (lambda c: c["recordings"][0]["vocabulary"].pop("35"), "lacks token 35"),
        (lambda c: c["recordings"][0]["rounds"][0].update(accepted=9), "round 1 accepts 9"),
        (lambda c: c["recordings"][0]["rounds"][1].update(token=99), "what round 2 committed"),
        (lambda c: c["recordings"][0]["rounds"][0].update(confidence=["x"]), "should be a number"),
        (lambda c: c["recordings"][0]["rounds"][0].update(target=[]), "alternatives for each slot"),
        (lambda c: c["recordings"][0]["rounds"][0]["seconds"].update(draft=float("nan")), "NaN"),
    ],
)
def test_malformed_traces_are_refused_in_one_sentence(tmp_path, change, reason):
    save([recording("some text to keep")], tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    change(content)
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is not a trace of") as error:
        load(tmp_path / "trace.json")
    assert reason in str(error.value)
    result = CliRunner().invoke(app, ["view", "--trace", str(tmp_path / "trace.json")])
    assert result.exit_code == 2 and "Traceback" not in result.output


@pytest.mark.parametrize("do_sample", [False, True])
def test_texts_that_end_inside_a_draft_are_kept(tmp_path, tokenizer, do_sample):
    target = tiny_target("llama")
    script = target.generate(prompt(7), do_sample=False, max_new_tokens=24)[0]
    for end in set(script[9:24].tolist()):
        drafter = scripted_drafter(target, script, accuracy=1.0)
        with drafter.trace(alternatives=2) as rounds:
            arguments = {"do_sample": do_sample, "top_k": 1 if do_sample else None, "eos_token_id": end}
            sequence = target.generate(prompt(7), assistant_model=drafter, max_new_tokens=24, **arguments)[0]
        kept = Recording.of(rounds, sequence, tokenizer)
        save([kept], tmp_path / "trace.json")
        assert load(tmp_path / "trace.json") == [kept]
        assert kept.answer == sequence[7:].tolist() and kept.answer[-1] == end
        if rounds[-1].ended:
            break
    assert kept.rounds[-1].ended and terminal.fates(kept.rounds[-1])[kept.rounds[-1].accepted] == "accepted"
    assert "rejected" not in terminal.fates(kept.rounds[-1])


def test_rounds_of_two_calls_are_refused(tokenizer):
    target, drafter, _, _ = generated()
    with drafter.trace(alternatives=2) as rounds:
        for _ in range(2):
            sequence = target.generate(prompt(7), assistant_model=drafter, do_sample=False, max_new_tokens=8)[0]
    with pytest.raises(ValueError, match="not behind the one before it"):
        Recording.of(rounds, sequence, tokenizer)
    with pytest.raises(ValueError, match=re.escape("drafter.trace(alternatives=5)")):
        Recording.of([Round([1])], sequence, tokenizer)


def test_pieces_spell_the_text():
    tokens = list(TEXT.encode())
    found = pieces(byte_tokenizer(), tokens)
    assert "".join(found) == TEXT
    smile = TEXT.encode().index("🙂".encode())
    assert found[smile : smile + 4] == ["", "", "", "🙂"]
    assert "".join(pieces(byte_tokenizer(), tokens[: smile + 2])).startswith(TEXT[: TEXT.index("🙂")])


def test_tokens_are_visible():
    texts = vocabulary(byte_tokenizer(), [32, 65, 10, 240])
    assert texts == {10: "\n", 32: " ", 65: "A", 240: "<F0>"}
    assert [visible(text) for text in (" a\n", "\t", "\u202e", "\u200d", "\x1b[2J", "שלום", "é", "")] == [
        "·a⏎",
        "⇥",
        "U+202E",
        "U+200D",
        "U+001B[2J",
        "שלום",
        "é",
        "∅",
    ]


def test_alignment_cuts_where_both_end_a_round():
    left, right = recording("abcdefghijklm", (3, 0, 2)), recording("abcdefghijklm", (1,))
    stretches = align(left, right)
    assert verdict(left, right) == "Both answers are the same 13 tokens, aligned by position."
    assert stretches[0].start == 1 and stretches[-1].stop == 13
    for stretch, following in pairwise(stretches):
        assert stretch.stop == following.start
        assert (stretch.left[1], stretch.right[1]) == (following.left[0], following.right[0])
    for one, side in ((left, "left"), (right, "right")):
        assert getattr(stretches[-1], side)[1] == len(one.rounds)
        for stretch in stretches:
            assert one.ends[getattr(stretch, side)[1] - 1] == stretch.stop
    assert len(stretches) > 2


def test_alignment_ends_at_the_first_difference():
    left, right = recording("abcdefgXijklm", (1,)), recording("abcdefgYi", (1,))
    assert common_tokens(left, right) == 7
    assert "the same for 7 tokens and differ" in verdict(left, right)
    stretches = align(left, right)
    assert [stretch.stop for stretch in stretches[:-1]] == [3, 5, 7]
    assert stretches[-1].left == (3, 6) and stretches[-1].right == (3, 4)
    assert "One answer ends after 9" in verdict(recording("abcdefgYi"), recording("abcdefgYijk"))


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.data = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag == "script" and dict(attributes).get("id") == "data"

    def handle_data(self, text):
        if self._inside:
            self.data += text
            self._inside = False


def test_page_holds_everything_and_lets_nothing_out(tmp_path):
    one = recording(TEXT, prompt=HOSTILE, drafter=HOSTILE, target=HOSTILE)
    write_page([one, recording(TEXT, (1,))], tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags and tags.count("script") == 2
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    addresses = [attributes.get(name) for _, attributes in page.tags for name in ("src", "href") if name in attributes]
    assert addresses == ["data:,"]
    data = json.loads(page.data)
    assert "".join(data["recordings"][0]["pieces"]) == TEXT
    assert data["recordings"][0]["prompt"] == HOSTILE
    assert len(data["stretches"]) == len(align(one, recording(TEXT, (1,))))


def test_terminal_shows_every_draft_and_no_control_character():
    console = Console(width=160, record=True, file=io.StringIO())
    one = recording("ab\x1b[2Jcd [bold]x[/bold]")
    console.print(terminal.show([one]))
    console.print(terminal.show([one, recording("ab\x1b[2Jcd [bold]x[/bold]", (1,))]))
    text = console.export_text()
    assert "\x1b" not in text and "[bold]x" in text
    assert "b 50✓" in text and "✗" in text and "# 50✂" in text
    assert "aligned by position" in text


def test_head_on_against_head_off(tokenizer):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    both = [
        record(target, tokenizer, drafter, "abc", way, max_new_tokens=12, method=method)
        for way, method in ((as_configured, ""), (head_off, "off"))
    ]
    assert both[0].answer == both[1].answer
    assert any(each.details.confidence for each in both[0].rounds)
    assert not any(each.details.confidence for each in both[1].rounds)
    assert "Both answers" in verdict(*both)


def test_command_line(tmp_path, tokenizer):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    drafter = tiny_drafter(target)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path / "drafter")
    models_ = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    files = ["--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "trace.json")]
    more = ["--prompt", "abc", "--max-new-tokens", "10", "--against", "head-off"]
    result = CliRunner().invoke(app, ["view", *models_, *files, *more])
    assert result.exit_code == 0, result.output
    first, second = load(tmp_path / "trace.json")
    assert (first.method, second.method) == ("as configured", "sequential head off")
    assert first.answer == second.answer and len(first.answer) == 10
    assert json.loads(Page((tmp_path / "page.html").read_text(encoding="utf-8")).data)["stretches"]
    again = CliRunner().invoke(
        app, ["view", "--trace", str(tmp_path / "trace.json"), "--html", str(tmp_path / "b.html")]
    )
    assert again.exit_code == 0, again.output
    assert (tmp_path / "b.html").read_text() == (tmp_path / "page.html").read_text()
    sampled = ["--prompt", "abc", "--temperature", "1", "--against", str(tmp_path / "drafter")]
    assert CliRunner().invoke(app, ["view", *models_, *sampled]).exit_code == 0


@pytest.mark.parametrize(
    ("fields", "has_one"),
    [
        ({"markov_rank": 0}, False),
        ({"markov_rank": 0, "copy_ngram_size": 2}, True),
        ({"markov_rank": 0, "enable_confidence_head": False, "selector_rank": 4, "selector_top_k": 4}, True),
    ],
)
def test_head_off_is_for_drafters_with_one(fields, has_one, tmp_path, tokenizer):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_drafter(target, **fields).save_pretrained(tmp_path / "drafter")
    models_ = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    more = ["--prompt", "abc", "--max-new-tokens", "4", "--against", "head-off"]
    result = CliRunner().invoke(app, ["view", *models_, *more])
    assert (result.exit_code == 0) is has_one, result.output
    assert ("neither" in result.output) is not has_one


@pytest.mark.parametrize(
    "arguments", [[], ["--target", "x"], ["--trace", "nowhere.json"], ["--trace", "x", "--prompt", "y"]]
)
def test_command_line_says_what_is_missing(arguments):
    result = CliRunner().invoke(app, ["view", *arguments])
    assert result.exit_code == 2 and "Error" in result.output


def test_long_pages_stay_small():
    one = recording("All the answer's words, again and again. " * 98)
    assert len(one.answer) > 4000
    assert len(html([one])) < 3_000_000
    assert as_json(one)["start"] == 10
