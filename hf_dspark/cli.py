"""The command line: `hf-dspark COMMAND`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich
import torch
import typer

if TYPE_CHECKING:
    from .modeling_dspark import DSparkModel

app = typer.Typer(no_args_is_help=True, add_completion=False, help="DSpark speculative decoding for transformers.")


def target_folder(name: str) -> str:
    """What `--target` names: a folder or Hub repository, or the demonstration's own target."""
    if name == "smollm2":
        from .demo import smollm2

        return str(smollm2())
    return name


def name_of(model: str | Path) -> str:
    """What a report calls a model: its repository, or the name of its folder."""
    return Path(model).resolve().name if Path(model).exists() else str(model)


def named_dtype(name: str) -> torch.dtype:
    """The dtype that `--dtype` names."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise typer.BadParameter(f"{name} is no dtype; use bfloat16 or float32.", param_hint="--dtype")
    return dtype


def load_both(target: str, drafter: str | Path, dtype: torch.dtype) -> tuple:
    """The target with its tokenizer, and the drafter, on the accelerator if there is one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .modeling_dspark import DSparkModel

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    folder = target_folder(target)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    draft_model = DSparkModel.from_pretrained(drafter, dtype=dtype).eval().to(device)
    return model, AutoTokenizer.from_pretrained(folder), draft_model


def override_schedule(drafter: DSparkModel, length: int | None, threshold: float | None) -> None:
    """Put what the command line says in the place of the drafter's own settings."""
    if length is not None:
        drafter.generation_config.num_assistant_tokens = length
    if threshold is not None:
        drafter.generation_config.assistant_confidence_threshold = threshold


TARGET_HELP = "Folder or Hub repository of the target, or `smollm2`, the demo's."
Target = Annotated[str, typer.Option(help=TARGET_HELP)]
Drafter = Annotated[
    str | None, typer.Option(help="Folder or Hub repository of the drafter (default: the shipped one).")
]
Prompts = Annotated[list[Path], typer.Option(help="A jsonl file of `messages` or `prompt` rows; may be repeated.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only so many prompts of each file.")]
AnswerLength = Annotated[int, typer.Option(min=2, help="Length of each answer.")]
NumAssistantTokens = Annotated[
    int | None, typer.Option(help="Verify at most so many drafts a round (default: the drafter's setting).")
]
ConfidenceThreshold = Annotated[
    float | None, typer.Option(help="Stop drafts at a lower confidence (default: the drafter's setting).")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(help="Folder or .json file for the profile (default: the drafter's folder, or this one)."),
]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]


@app.command()
def demo(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt to answer; may be repeated.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="A drafter other than the shipped one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 128,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, which the CPU has to be made for, or float32. Unset: what is faster.")
    ] = None,
) -> None:
    """Answer a few prompts with and without the shipped drafter for SmolLM2-135M-Instruct."""
    from . import demo as demonstration

    demonstration.run(
        tuple(prompt or demonstration.PROMPTS),
        drafter or demonstration.DRAFTER,
        max_new_tokens=max_new_tokens,
        dtype=named_dtype(dtype) if dtype else None,
    )


@app.command()
def data(
    target: Target,
    output: Annotated[Path, typer.Option(help="Folder for the data.")],
    prompts: Annotated[
        str | None,
        typer.Option(help="A jsonl file or data set whose conversations to answer (default: self-written)."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "train",
    tokens: Annotated[int | None, typer.Option(help="Stop at so many tokens.")] = None,
    batch_size: Annotated[int, typer.Option(help="Conversations written at once.")] = 128,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Longest question (default: 128), or longest prompt (default: 1024).")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of the answers, in turn; 0 is greedy (default: 0 and 1).")
    ] = None,
    top_k: Annotated[int, typer.Option(help="Sample from so many of the likeliest tokens.")] = 50,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="`enable_thinking` of the chat template.")
    ] = None,
    seed: int = 0,
) -> None:
    """Let the target write training data: all of it, or answers to given prompts. Run again, it goes on."""
    from .training.data import write_data
    from .training.recipe import load_target

    model, tokenizer = load_target(target_folder(target))
    write_data(
        model,
        tokenizer,
        output,
        prompts,
        split,
        tokens,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        temperatures=tuple(temperature or (0.0, 1.0)),
        top_k=top_k,
        seed=seed,
        **({} if max_prompt_tokens is None else {"max_prompt_tokens": max_prompt_tokens}),
        **({} if thinking is None else {"enable_thinking": thinking}),
    )


@app.command()
def train(
    target: Target,
    output: Annotated[Path, typer.Option(help="Folder for the drafter, its data and its checkpoints.")],
    drafter: Annotated[
        str | None,
        typer.Option(help="A drafter to go on from, whose layers and heads are kept, instead of a new one."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder made by `hf-dspark data`, or jsonl file of `input_ids` (default: self-written)."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of text to have the target write if there is no data.")
    ] = 500_000,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Sequences per step and process.")] = 4,
    gradient_accumulation: Annotated[int, typer.Option(help="Batches per step.")] = 1,
    anchors: Annotated[int, typer.Option(help="Draft blocks per sequence and step.")] = 96,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    layers: Annotated[int, typer.Option(help="Draft layers.")] = 2,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads (default: the target's).")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Rows of a draft block (default: 7, or the drafter's own).")
    ] = None,
    head: Annotated[str, typer.Option(help="Sequential head: vanilla, gated or rnn.")] = "vanilla",
    rank: Annotated[int, typer.Option(help="Rank of the sequential head.")] = 64,
    copy_ngram_size: Annotated[
        int | None,
        typer.Option(
            help="Longest repetition that the copy head goes by; 0 for none, as in other engines (default: 6, or the "
            "drafter's own)."
        ),
    ] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(help="Tokens that the drafter can propose.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="A token that never occurs in text.")] = None,
    cache: Annotated[
        bool,
        typer.Option(help="Keep what the target says on disk, so that it runs in the first epoch only (see README)."),
    ] = False,
    seed: int = 0,
) -> None:
    """Train a drafter, on text that the target writes itself or on given rows. Run again, it goes on where it was."""
    from .demo import REPOSITORY
    from .training.recipe import train_drafter

    fields = {
        "base_model": REPOSITORY if target == "smollm2" else None,
        "block_size": block_size,
        "copy_ngram_size": copy_ngram_size,
        "num_key_value_heads": kv_heads,
        "draft_vocab_size": draft_vocab_size,
    }
    train_drafter(
        target_folder(target),
        output,
        data=data,
        tokens=tokens,
        steps=steps,
        batch_size=batch_size,
        gradient_accumulation=gradient_accumulation,
        anchors=anchors,
        learning_rate=learning_rate,
        mask_token_id=mask_token_id,
        cache=cache,
        seed=seed,
        drafter_path=drafter,
        num_hidden_layers=layers,
        markov_head_type=head,
        markov_rank=rank,
        **{name: value for name, value in fields.items() if value is not None},
    )


@app.command(name="eval")
def evaluate(
    target: Target,
    prompts: Prompts,
    drafter: Drafter = None,
    limit: Limit = None,
    max_new_tokens: AnswerLength = 256,
    num_assistant_tokens: NumAssistantTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    baselines: Annotated[bool, typer.Option(help="Compare with prompt lookup and DFlash, too.")] = True,
    dtype: Dtype = "bfloat16",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
    report_folder: Annotated[
        Path | None, typer.Option("--report", help="Write a report with plots and the results there.")
    ] = None,
    seed: int = 0,
) -> None:
    """Measure a drafter on sets of prompts: acceptance, speed, confidence; greedy and at temperature 1."""
    from .demo import DRAFTER, REPOSITORY
    from .evaluation.measurement import evaluate, summary
    from .evaluation.prompts import read_sets

    if report_folder is not None:
        try:
            from .evaluation.report import write_report
        except ImportError as error:
            raise typer.BadParameter(f"A report needs {error.name}: pip install 'hf-dspark[report]'.") from error
    try:
        sets = read_sets(prompts, limit)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--prompts") from error
    dtype_of_both = named_dtype(dtype)
    model, tokenizer, draft_model = load_both(target, drafter or DRAFTER, dtype_of_both)
    override_schedule(draft_model, num_assistant_tokens, confidence_threshold)
    try:
        reports = evaluate(
            model,
            tokenizer,
            draft_model,
            sets,
            max_new_tokens=max_new_tokens,
            baselines=baselines,
            seed=seed,
            target_name=REPOSITORY if target == "smollm2" else name_of(target),
            drafter_name=name_of(drafter or DRAFTER),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for report in reports:  # one set more each time
        if json_file is not None:
            report.save(json_file)
        if report_folder is not None:
            write_report(report, report_folder)
    rich.print(summary(report))


def profile_file(drafter: str, output: Path | None) -> tuple:
    """Where a drafter's hardware profile goes, and the one that is there already or `None`."""
    from .scheduling.profile import HardwareProfile

    output = output or Path(drafter if Path(drafter).is_dir() else ".")
    try:
        return output, HardwareProfile.load(output)
    except FileNotFoundError:
        return output, None
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{error} Move it away first.", param_hint="--output") from error


@app.command()
def view(
    target: Annotated[str | None, typer.Option(help=TARGET_HELP)] = None,
    drafter: Drafter = None,
    prompt: Annotated[str | None, typer.Option(help="What the target is asked.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Show this trace file instead of generating.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Side by side with: `head-off`, `full-blocks`, or another drafter.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at in a browser there.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the trace there.")] = None,
    max_new_tokens: AnswerLength = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling; 0 is greedy.")] = 0.0,
    alternatives: Annotated[int, typer.Option(min=1, help="Likely tokens to keep of every slot.")] = 5,
    num_assistant_tokens: NumAssistantTokens = None,
    confidence_threshold: ConfidenceThreshold = None,
    dtype: Dtype = "float32",
    seed: int = 0,
) -> None:
    """Show what a drafter does, round by round: in the terminal, and as a page; one recording or two side by side."""
    from .demo import DRAFTER, REPOSITORY
    from .evaluation.variants import as_configured, full_blocks, head_off
    from .generation.candidate_generator import scheduler_of
    from .modeling_dspark import DSparkModel
    from .viewer import terminal
    from .viewer.recording import load, record, save

    if html is not None:
        try:
            from .viewer.page import write_page
        except ImportError as error:
            raise typer.BadParameter(f"A page needs {error.name}: pip install 'hf-dspark[report]'.") from error
    if trace is not None:
        if (target, drafter, prompt, against, json_file) != (None,) * 5:
            raise typer.BadParameter("It is shown as it is; only --html goes with it.", param_hint="--trace")
        try:
            recordings = load(trace)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="--trace") from error
    else:
        if target is None or not prompt:
            raise typer.BadParameter("Give --target and --prompt, or --trace with a trace file.")
        ways = {"head-off": (head_off, "sequential head off"), "full-blocks": (full_blocks, "full blocks")}
        model, tokenizer, draft_model = load_both(target, drafter or DRAFTER, named_dtype(dtype))
        name = name_of(drafter or DRAFTER)
        runs = [(draft_model, name, as_configured, "as configured" if against in ways else "")]
        try:
            if against == "head-off" and not draft_model.sequential_head and not draft_model.copy_head:
                raise ValueError("The drafter has neither sequential nor copy head that could be off.")
            if against in ways:
                runs.append((draft_model, name, *ways[against]))
            elif against is not None:
                other = DSparkModel.from_pretrained(against, dtype=draft_model.dtype).eval().to(model.device)
                runs.append((other, name_of(against), as_configured, ""))
            for running, *_ in runs:
                running.check_target(model)
                override_schedule(running, num_assistant_tokens, confidence_threshold)
                scheduler_of(running)
            recordings = [
                record(
                    model,
                    tokenizer,
                    running,
                    prompt,
                    way,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    alternatives=alternatives,
                    seed=seed,
                    target_name=REPOSITORY if target == "smollm2" else name_of(target),
                    drafter_name=name,
                    method=method,
                )
                for running, name, way, method in runs
            ]
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
    if json_file is not None:
        save(recordings, json_file)
    if html is not None:
        write_page(recordings, html)
    rich.print(terminal.show(recordings))


@app.command()
def profile(
    target: Target,
    drafter: Drafter = None,
    output: ProfileFile = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once, besides one; may be repeated (default: 2, 4).")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long what is uncertain may be repeated; on a busy machine, more helps.")
    ] = 60,
    plot: Annotated[Path | None, typer.Option(help="Draw rounds per second into this image file.")] = None,
    dtype: Dtype = "bfloat16",
) -> None:
    """Measure what rounds cost on this machine, into the hardware profile that travels with the drafter."""
    from .demo import DRAFTER, PROMPTS
    from .evaluation.hardware import prompt_ids, summary
    from .generation import profiler
    from .scheduling.profile import HardwareProfile

    if plot is not None:
        try:
            from .evaluation.plots import save_steps_per_second
        except ImportError as error:
            raise typer.BadParameter(f"A plot needs {error.name}: pip install 'hf-dspark[report]'.") from error
    dtype_of_both = named_dtype(dtype)
    drafter = drafter or str(DRAFTER)
    output, known = profile_file(drafter, output)
    model, tokenizer, draft_model = load_both(target, drafter, dtype_of_both)
    try:
        with rich.get_console().status("Measuring, a minute or more ..."):
            texts = [prompt_ids(tokenizer, prompt) for prompt in PROMPTS]
            entry = profiler.profile(model, draft_model, texts, rows or profiler.ROWS, seconds=seconds)
        kept = known or draft_model.hardware_profile or HardwareProfile()
        kept.add(entry)
        written = kept.save(output)
        if plot is not None:
            save_steps_per_second(entry, plot)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: no profile. Reason: {error}", err=True)
        raise typer.Exit(1) from error
    rich.print(summary(entry))
    typer.echo(written)


Checkpoint = Annotated[str, typer.Argument(help="Folder or Hub repository of a drafter, in any format.")]
ItsTarget = Annotated[
    str | None, typer.Option("--target", help="Folder or Hub repository of its target, or `smollm2`.")
]


@app.command()
def inspect(checkpoint: Checkpoint, target: ItsTarget = None) -> None:
    """Say what a drafter is, in whichever format, and whether it runs here, without loading it."""
    from rich.table import Table
    from rich.text import Text

    from .inspection import inspect

    try:
        rows = inspect(checkpoint, None if target is None else target_folder(target))
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    table = Table(title=Text(name_of(checkpoint)), show_header=False)
    table.add_column(no_wrap=True)
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    rich.print(table)


@app.command()
def convert(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(help="Folder to write, which has to be empty or not there.")],
    to: Annotated[str, typer.Option(help="native, deepspec (vLLM, SGLang, llama.cpp) or speculators (vLLM).")],
    target: ItsTarget = None,
) -> None:
    """Write a drafter in another format, with copies of the target's tables where that format has its own."""
    from transformers import AutoModelForCausalLM

    from .checkpoints import NATIVE, obstacle, read_config
    from .configuration_dspark import DSparkConfig
    from .demo import REPOSITORY
    from .hub import repository_of
    from .inspection import borrowed_tables
    from .modeling_dspark import DSparkModel

    try:
        if output.exists() and any(output.iterdir()):
            raise ValueError(f"{output} is not empty: name another folder.")
        config = DSparkConfig.from_dict(read_config(checkpoint))
        if to != NATIVE and (reason := obstacle(to, config)) is not None:
            raise ValueError(reason)
        if target is None and (tables := borrowed_tables(to, config)):
            raise ValueError(f"In the {to} format a drafter has its own {' and '.join(tables)}: name its --target.")
        drafter = DSparkModel.from_pretrained(checkpoint, dtype="auto")
        if target is not None:
            model = AutoModelForCausalLM.from_pretrained(target_folder(target), dtype="auto")
            drafter.bind(model)
            repository = REPOSITORY if target == "smollm2" else repository_of(model)
            drafter.config.base_model = drafter.config.base_model or repository
        drafter.save_pretrained(output, format=to)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(output)


@app.command()
def calibrate(
    target: Target,
    prompts: Prompts,
    drafter: Drafter = None,
    limit: Limit = None,
    max_new_tokens: AnswerLength = 256,
    output: ProfileFile = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all that was found there.")] = None,
    temperatures: Annotated[
        Path | None,
        typer.Option(help="Folder for greedy.json and sample.json, which SGLang and TensorRT-LLM read."),
    ] = None,
    dtype: Dtype = "bfloat16",
    seed: int = 0,
) -> None:
    """Calibrate a drafter's confidences on prompts, into the hardware profile that travels with it."""
    from .demo import DRAFTER, REPOSITORY
    from .evaluation import calibrator
    from .evaluation.prompts import read_sets
    from .scheduling.calibration import write_temperatures
    from .scheduling.profile import HardwareProfile

    try:
        sets = read_sets(prompts, limit)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--prompts") from error
    dtype_of_both = named_dtype(dtype)
    drafter = drafter or str(DRAFTER)
    output, known = profile_file(drafter, output)
    model, tokenizer, draft_model = load_both(target, drafter, dtype_of_both)
    if temperatures is not None and draft_model.confidence_head is None:
        raise typer.BadParameter("Temperatures are of a confidence head; this drafter has none.")
    try:
        report = calibrator.calibrate(
            model,
            tokenizer,
            draft_model,
            sets,
            max_new_tokens=max_new_tokens,
            seed=seed,
            target_name=REPOSITORY if target == "smollm2" else name_of(target),
            drafter_name=name_of(drafter),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    kept = known or draft_model.hardware_profile or HardwareProfile()
    report.put_into(kept)
    written = kept.save(output)
    if json_file is not None:
        report.save(json_file)
    for regime, choice in report.regimes.items() if temperatures is not None else ():
        before, after = (choice.candidates[name].survival_ece for name in ("head", "temperature"))
        write_temperatures(
            temperatures / f"{regime}.json", choice.temperatures, ", ".join(sets), choice.rounds, before, after
        )
    rich.print(calibrator.summary(report))
    typer.echo(written)


Folder = Annotated[Path, typer.Argument(help="Folder of the drafter.")]
Report = Annotated[Path | None, typer.Option(help="What `eval --json` wrote (default: the folder's eval.json).")]
License = Annotated[str | None, typer.Option(help="License of the weights, as the Hub abbreviates it.")]
BaseModel = Annotated[str | None, typer.Option(help="Hub repository of the target, if the drafter does not know it.")]


def _checked(folder: Path, report: Path | None) -> None:
    """Refuse a folder that holds no whole drafter; put the report into it."""
    from .hub import keep_report, read_report
    from .modeling_dspark import DSparkModel

    results = None if report is None else read_report(report)
    DSparkModel.from_pretrained(folder)
    if results is not None:
        keep_report(folder, results)


@app.command()
def card(folder: Folder, report: Report = None, license: License = None, base_model: BaseModel = None) -> None:
    """Write a drafter's model card, from its config, training record and evaluation report."""
    from .hub import CARD, write_card

    try:
        _checked(folder, report)
        write_card(folder, base_model=base_model, license=license)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(folder / CARD)


@app.command()
def push(
    folder: Folder,
    repo_id: Annotated[str, typer.Argument(help="Where to: `name`, or `organization/name`.")],
    private: Annotated[bool | None, typer.Option(help="Visibility of a new repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch (default: main).")] = None,
    report: Report = None,
    license: License = None,
    base_model: BaseModel = None,
) -> None:
    """Upload a drafter to the Hub, with its model card; training state and data stay here."""
    from . import hub

    try:
        _checked(folder, report)
        address = hub.push(folder, repo_id, private, revision=revision, base_model=base_model, license=license)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(address)


if __name__ == "__main__":
    app()
