"""
Prompts that ask for code, from the functions of Python packages: signature and docstring, without the body.

    python examples/function_prompts.py prompts.jsonl FOLDER [FOLDER ...] [--limit 1000]
    hf-dspark data --target TARGET --prompts prompts.jsonl --output data

A small target left to itself asks for little code. These have it write functions, and a drafter learns from them.
"""

from __future__ import annotations

import ast
import json
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path

import typer

REQUESTS = (
    "Complete the following Python function:\n```python\n{code}\n```",
    "Write a Python function that does what this docstring says.\n\n```python\n{code}\n```",
    "Finish this code:\n```python\n{code}\n```",
    "Solve the following programming problem in Python.\n\n{code}",
    "```python\n{code}\n```\nWrite the body of this function.",
    "Implement the function below and explain how it works.\n```python\n{code}\n```",
    "Please implement this in Python and write a few tests for it:\n```python\n\n{code}\n\n```",
)
SHORTEST, LONGEST = 40, 700  # characters of a docstring


def functions(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and headless code of every documented public function in a folder."""
    for file in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(file.read_text())
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith(("_", "test")):
                continue
            names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
            said = ast.get_docstring(node) or ""
            if names and len(names) <= 4 and SHORTEST <= len(said) <= LONGEST:
                documentation = textwrap.indent(f'"""{said}"""', "    ")
                yield node.name, f"def {node.name}({', '.join(names)}):\n{documentation}\n"


def main(output: Path, folders: list[Path], limit: int = 1000, seed: int = 0) -> None:
    found = dict(function for folder in folders for function in functions(folder))  # each name once
    chosen = sorted(found.values())
    random.Random(seed).shuffle(chosen)
    chosen.sort(key=lambda code: ">>>" not in code)  # those with examples first
    requests = random.Random(seed)
    with output.open("w") as lines:
        for code in chosen[:limit]:
            lines.write(json.dumps({"prompt": requests.choice(REQUESTS).format(code=code)}) + "\n")
    typer.echo(f"{output}: {min(limit, len(chosen))} of {len(chosen)} functions")


if __name__ == "__main__":
    typer.run(main)
