"""Writes docs/formats.md from what the tests try: `python tests/format_matrix.py`."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import GOLDEN
from test_convert import EXPORTED
from test_formats import PUBLISHED, PUBLISHED_BYTES, SIDE_BY_SIDE, WRITTEN

from hf_dspark.checkpoints import FORMATS, NATIVE, WRITERS, format_of, native, read_config
from hf_dspark.checkpoints.unsupported import Unsupported

DOCUMENT = Path(__file__).parent.parent / "docs" / "formats.md"
PARTS = {
    "markov_head_type": "gated and RNN heads",
    "draft_vocab_size": "pruned vocabulary",
    "has_embed_tokens": "own embeddings",
    "has_lm_head": "own output head",
    "layer_types": "sliding windows",
    "causal_in_block": "causal blocks",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "value scale",
    "rope_parameters": "YaRN or proportional RoPE",
    "rope_interleaved": "interleaved RoPE",
    "input_embedding_scale": "embedding scale",
    "output_multiplier": "output multiplier",
    "final_logit_softcapping": "softcap",
    "attention_k_eq_v": "values from keys",
    "selector_rank": "convolutions and candidate selector",
}
TEXT = """# Formats of checkpoints

`DSparkModel.from_pretrained` finds out which of these a checkpoint is, from its `config.json`, and reads it completely
or says why not. Weights are read from safetensors files alone; no code and no pickle of a repository is ever run. What
a config says and hf_dspark does not know is an error, by name: a wrong reading would only show as a lower acceptance.

This page is written by `tests/format_matrix.py`, from what the tests try.

| format | the first slot of a block | tried with | verified by | written as |
|---|---|---|---|---|
{read}

Reference values are those of the framework itself (tests/golden). Written in that layout: small drafters, saved under
the format's names and fields, draft as before, and other readings of windows, causality, rotary embeddings, scales and
caps draft differently. With all of them `generate()` gives the target's own text, and all can be saved in this
package's format. The parameters of {published} published drafters, counted from their geometry, are as many as the Hub
says.

## Written

`hf-dspark convert --to` and `drafter.save_pretrained(..., format=)` write a whole checkpoint, or say what it is that
the format cannot express.

| `--to` | what it can express beside a plain drafter | what goes along | verified by |
|---|---|---|---|
{written}

Read back, what was written has the same tensors and a config that computes the same. speculators itself takes
embeddings, and a whole vocabulary's output head, from its verifier, whatever a checkpoint has; vLLM keeps a
checkpoint's own.

## Known, and refused

| drafter | why |
|---|---|
{refused}

Quantised weights (NVFP4 and the like) and a mask token's embedding in a pickle are refused, too.
"""


ALONG = {
    NATIVE: "a model card, generation settings, a hardware profile",
    "deepspec": "copies of the target's embeddings and output head",
    "speculators": "with a pruned vocabulary, its rows of the target's output head",
}
WITH_BACKBONE = {"gemma4": "Gemma4 layers", "dflash2": "DFlash2 layers"}


def written() -> list[str]:
    """Rows of the formats that are written."""
    rows = [f"| {NATIVE} | everything that is read | {ALONG[NATIVE]} | round trips with all of the formats above |"]
    for name in WRITERS:
        cases = [fields for form, fields in EXPORTED if form == name]
        plain = [fields for fields in cases if "backbone" not in fields]
        can = [words for field, words in PARTS.items() if any(fields.get(field) for fields in plain)]
        can += [words for kind, words in WITH_BACKBONE.items() if kind in WRITERS[name]]
        how = f"round trips ({len(cases)})"
        how += ", speculators 0.9.0 (tests/interop/speculators_export.py)" if name == "speculators" else ""
        rows.append(f"| {name} | {', '.join(can)} | {ALONG[name]} | {how} |")
    return rows


def matrix() -> str:
    """The document."""
    values: dict[str, list[str]] = {}
    slots: dict[str, set[bool]] = {}
    for folder in sorted(file.parent for file in GOLDEN.glob("*_*/config.json")):
        found = format_of(json.loads((folder / "config.json").read_text()))
        if found is not None and not isinstance(found, Unsupported):
            values.setdefault(found.NAME, []).append(folder.name)
            slots.setdefault(found.NAME, set()).add(read_config(folder)["sample_from_anchor"])
    for name, fields, *_ in WRITTEN:
        slots.setdefault(name, set()).add(fields.get("sample_from_anchor", True))
    read, refused = [], []
    for found in FORMATS:
        if isinstance(found, Unsupported):
            refused.append(f"| {found.NAME} | {found.reason} |")
            continue
        cases = [fields for name, fields, *_ in WRITTEN if name == found.NAME]
        tried = [words for name, words in PARTS.items() if any(fields.get(name) for fields in cases)]
        how = [f"reference values ({', '.join(values[found.NAME])})"] if found.NAME in values else []
        how += [SIDE_BY_SIDE[found.NAME]] if found.NAME in SIDE_BY_SIDE else []
        how += [f"written in that layout ({len(cases)})"] if cases else ["round trips"]
        slot = " or ".join("used" if used else "unused" for used in sorted(slots.get(found.NAME, {True, False})))
        to = [name for name, modules in WRITERS.items() if found in modules.values()]
        to = [NATIVE] if found is native else to
        read.append(f"| {found.NAME} | {slot} | {', '.join(tried)} | {', '.join(how)} | {', '.join(to)} |")
    published = len(PUBLISHED) + len(PUBLISHED_BYTES)
    return TEXT.format(
        read="\n".join(read), written="\n".join(written()), refused="\n".join(refused), published=published
    )


if __name__ == "__main__":
    DOCUMENT.write_text(matrix(), encoding="utf-8")
