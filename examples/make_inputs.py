"""Make real training input from what every machine has: Python's own standard library. Nothing is downloaded.

    python examples/make_inputs.py OUT                  a model of about 6 M parameters, 6000 rows
    python examples/make_inputs.py OUT --size tiny      for tests: a few hundred rows, two small layers

Writes
    OUT/data/train.jsonl, OUT/data/eval.jsonl   {"messages": [{"role", "content"}, ...]}
    OUT/data/alpaca.jsonl                       {"instruction", "input", "output"}
    OUT/model/                                  Qwen3, random fp32 weights, with tokenizer and chat template

The rows are questions and answers about functions, classes and modules, made from their docstrings. What
eval.jsonl asks about does not occur in the other two files. The same seed on the same Python gives the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

Row = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal["module", "class", "function", "method", "property"]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# Tests and test helpers; machine-made tables; modules that say the same as another one under its public name.
NOT_SUBJECTS = {
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings", "ensurepip", "distutils",
    "site-packages", "dist-packages", "lib-dynload", "__pycache__", "ntpath.py", "nturl2path.py",
}  # fmt: skip
# Where the source's name is not the one that people write.
PUBLIC_NAMES = {
    "posixpath": "os.path",
    "genericpath": "os.path",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_collections_abc": "collections.abc",
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant who knows Python's standard library.",
    "Answer questions about Python shortly and correctly.",
    "You explain Python to beginners.",
)
ASK_PURPOSE = ("What does `{name}` do?", "Explain `{name}` in a few words.", "What is `{name}` for?")
ASK_SIGNATURE = ("What is the signature of `{name}`?", "Which arguments does `{name}` take?", "How do I call `{name}`?")
ASK_MODULE = ("Which module has the {kind} `{short}`?", "Where do I find the {kind} `{short}`?")
ASK_NAME = (
    "Which {kind} of the standard library is described like this? {summary}",
    "I look for a {kind}. Its documentation says: {summary}",
)
ASK_MORE = ("Tell me more.", "What else should I know about it?")


@dataclass(frozen=True)
class Shape:
    """How much to make. `modules`: top-level names to read, or none for the whole standard library."""

    rows: int
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    modules: tuple[str, ...] | None = None


SHAPES: dict[str, Shape] = {
    "demo": Shape(rows=6000, hidden=320, layers=4, heads=8, vocabulary=2048),
    "tiny": Shape(
        rows=300,
        hidden=32,
        layers=2,
        heads=4,
        vocabulary=512,
        modules=("argparse", "calendar", "configparser", "json", "pathlib", "posixpath", "shutil", "statistics"),
    ),
}


@dataclass(frozen=True)
class Inputs:
    """What was made, and where."""

    model: Path
    train: Path
    eval: Path
    alpaca: Path
    train_rows: int
    eval_rows: int
    parameters: int
    vocabulary: int


@dataclass(frozen=True)
class Subject:
    """Something with a docstring. `signature` and `more` are empty when there is none."""

    name: str
    kind: Kind
    module: str
    signature: str
    summary: str
    more: str


# --- reading the standard library -----------------------------------------------------------------------------


def standard_library() -> Path:
    """The folder of the running Python's own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect_subjects(root: Path, modules: Sequence[str] | None = None) -> list[Subject]:
    """Everything public below `root` that has a usable docstring, in the order of file and line.

    Files are parsed, never imported: the result does not depend on what can be imported here. A paragraph is
    taken once, where it occurs first, so no text can be in two splits.

    Raises FileNotFoundError when there are no sources.
    """
    subjects: list[Subject] = []
    taken: set[str] = set()
    for path in _sources(root, modules):
        for subject in _subjects_of(ast.parse(path.read_bytes()), _module_name(path.relative_to(root))):
            if subject.summary not in taken:
                subjects.append(replace(subject, more="") if subject.more in taken else subject)
                taken |= {subject.summary, subject.more}
    if not subjects:
        raise FileNotFoundError(
            f"{root} has no Python sources with docstrings: install the standard library's .py files "
            "(some minimal images keep only compiled ones), or run another Python"
        )
    return subjects


def _sources(root: Path, modules: Sequence[str] | None) -> Iterator[Path]:
    for entry in sorted(root.iterdir(), key=lambda path: path.name):
        if modules is not None and entry.name.removesuffix(".py") not in modules:
            continue
        if entry.suffix == ".py":
            candidates = [entry]
        elif (entry / "__init__.py").exists():
            candidates = sorted(entry.rglob("*.py"), key=lambda path: path.relative_to(root).parts)
        else:
            continue
        for path in candidates:
            parts = path.relative_to(root).parts
            if NOT_SUBJECTS.isdisjoint(parts) and _is_public(_module_name(Path(*parts))):
                yield path


def _module_name(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    name = ".".join(parts)
    return PUBLIC_NAMES.get(name, name)


def _is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def _subjects_of(tree: ast.Module, module: str) -> Iterator[Subject]:
    yield from _subject(tree, module, "module", module)
    for node in _definitions(tree.body):
        name = f"{module}.{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _subject(node, name, "class", module)
            for method in _definitions(node.body):
                if not isinstance(method, ast.ClassDef):
                    kind: Kind = "property" if _is_property(method) else "method"
                    yield from _subject(method, f"{name}.{method.name}", kind, module)
        else:
            yield from _subject(node, name, "function", module)


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.ClassDef | Function]:
    """Public definitions, also those that depend on the platform or on what could be imported."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            if _is_public(node.name):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body)
            yield from _definitions(node.orelse)


def _is_property(method: Function) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in method.decorator_list)


def _subject(node: ast.Module | ast.ClassDef | Function, name: str, kind: Kind, module: str) -> Iterator[Subject]:
    """One subject, or nothing when the docstring's first paragraph makes no good answer."""
    paragraphs = [" ".join(part.split()) for part in (ast.get_docstring(node) or "").split("\n\n")]
    if _is_prose(paragraphs[0]):
        more = paragraphs[1] if len(paragraphs) > 1 and _is_prose(paragraphs[1]) else ""
        signature = "" if kind == "property" else _signature(node, name)
        yield Subject(name, kind, module, signature, paragraphs[0], more)


def _is_prose(text: str) -> bool:
    return 20 <= len(text) <= 400 and text.isascii() and ">>>" not in text and "<|" not in text


def _signature(node: ast.AST, name: str) -> str:
    """`name(arguments)` without the receiver; a class takes that of its `__init__`."""
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                return _signature(member, name)
    if not isinstance(node, Function):
        return ""
    arguments = ast.unparse(node.args).split(", ")
    if arguments[0] in ("self", "cls"):
        del arguments[: 2 if arguments[1:2] == ["/"] else 1]
    signature = f"{name}({', '.join(arguments)})"
    return signature if len(signature) <= 160 and signature.isascii() else ""


# --- making rows ----------------------------------------------------------------------------------------------


def split_subjects(subjects: Sequence[Subject], seed: int) -> tuple[list[Subject], list[Subject]]:
    """Subjects for training, and a tenth of them held out."""
    shuffled = list(subjects)
    random.Random(f"split {seed}").shuffle(shuffled)
    held_out = len(shuffled) // 10
    return shuffled[held_out:], shuffled[:held_out]


def make_rows(subjects: Sequence[Subject], count: int, seed: int) -> list[Row]:
    """`count` conversations about `subjects`: some of several turns, a quarter with a system turn.

    Raises ValueError when the subjects do not give so many.
    """
    choice = random.Random(f"rows {seed}")
    rows = [row for subject in subjects for row in _conversations(subject, choice)]
    if count > len(rows):
        raise ValueError(f"rows: {count} asked for, this Python's docstrings give {len(rows)}: ask for fewer")
    choice.shuffle(rows)
    return rows[:count]


def _conversations(subject: Subject, choice: random.Random) -> Iterator[Row]:
    def ask(questions: Sequence[str]) -> str:
        return choice.choice(questions).format(
            name=subject.name,
            short=subject.name.removeprefix(f"{subject.module}."),
            kind=subject.kind,
            summary=subject.summary,
        )

    purpose = (ask(ASK_PURPOSE), subject.summary)
    more = (ask(ASK_MORE), subject.more)
    signature = (ask(ASK_SIGNATURE), f"`{subject.signature}`")
    module = (ask(ASK_MODULE), f"It is in the module `{subject.module}`.")
    conversations = [[purpose], [(ask(ASK_NAME), f"That is `{subject.name}`.")]]
    if subject.signature:
        conversations += [[signature], [purpose, ("And how do I call it?", signature[1])]]
    if subject.more:
        conversations += [[(ask(ASK_PURPOSE), subject.summary), more]]
    if subject.kind != "module":
        conversations += [[module, (f"What does this {subject.kind} do?", subject.summary)]]
    if subject.kind in ("class", "function"):
        conversations += [[module]]
    for turns in conversations:
        messages = [{"role": "system", "content": choice.choice(SYSTEM_PROMPTS)}] if choice.random() < 0.25 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"messages": messages}


def make_alpaca_rows(subjects: Sequence[Subject], count: int) -> list[Row]:
    """Up to `count` rows in Alpaca's format, every second one with an empty `input`."""
    rows = []
    for index, subject in enumerate(subjects[:count]):
        if index % 2:
            row = {"instruction": ASK_PURPOSE[0].format(name=subject.name), "input": ""}
        else:
            row = {"instruction": f"Say what this {subject.kind} does.", "input": subject.signature or subject.name}
        rows.append({**row, "output": subject.summary})
    return rows


def write_jsonl(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


# --- making the model -----------------------------------------------------------------------------------------


def train_tokenizer(rows: Sequence[Row], vocabulary: int) -> Any:
    """A byte-level BPE of at most `vocabulary` tokens (259 at least: 256 bytes and three control tokens)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < 259:
        raise ValueError(f"vocabulary: {vocabulary} is too small for 256 bytes and three control tokens: at least 259")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def initialise_model(shape: Shape, tokenizer: Any, seed: int) -> Any:
    """A Qwen3ForCausalLM with random fp32 weights; the caller's random state is left as it was."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    if shape.hidden % (2 * shape.heads):
        raise ValueError(f"hidden: {shape.hidden} is no multiple of twice the number of heads ({2 * shape.heads})")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(1, shape.heads // 2),
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # A narrow model hardly learns from the usual 0.02, which suits widths of thousands.
        initializer_range=round(shape.hidden**-0.5, 4),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    return model


# --- all of it ------------------------------------------------------------------------------------------------


def make_inputs(out: Path, size: Literal["demo", "tiny"] = "demo", seed: int = 0) -> Inputs:
    """Make data and model of a named size below `out`; see the module's docstring for the files."""
    return make_inputs_of_shape(out, SHAPES[size], seed)


def make_inputs_of_shape(out: Path, shape: Shape, seed: int) -> Inputs:
    """Make data and model below `out`, replacing what an earlier call left there."""
    training, held_out = split_subjects(collect_subjects(standard_library(), shape.modules), seed)
    train_rows = make_rows(training, shape.rows, seed)
    eval_rows = make_rows(held_out, max(16, shape.rows // 25), seed)
    data = out / "data"
    write_jsonl(data / "train.jsonl", train_rows)
    write_jsonl(data / "eval.jsonl", eval_rows)
    write_jsonl(data / "alpaca.jsonl", make_alpaca_rows(training, shape.rows // 5))

    tokenizer = train_tokenizer(train_rows, shape.vocabulary)
    model = initialise_model(shape, tokenizer, seed)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    # The weights are saved readable by their owner alone; a training pod often runs as somebody else.
    (out / "model" / "model.safetensors").chmod(0o644)
    return Inputs(
        model=out / "model",
        train=data / "train.jsonl",
        eval=data / "eval.jsonl",
        alpaca=data / "alpaca.jsonl",
        train_rows=len(train_rows),
        eval_rows=len(eval_rows),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=len(tokenizer),
    )


def _hide_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    parser.add_argument("--size", choices=sorted(SHAPES), default="demo", help="defaults of the options below")
    parser.add_argument("--seed", type=int, default=0)
    numbers = [field.name for field in fields(Shape) if field.name != "modules"]
    for number in numbers:
        of_sizes = ", ".join(f"{size} {getattr(shape, number)}" for size, shape in SHAPES.items())
        parser.add_argument(f"--{number}", type=int, help=f"instead of: {of_sizes}")
    options = parser.parse_args(arguments)

    asked_for = {number: value for number in numbers if (value := getattr(options, number)) is not None}
    _hide_progress_bars()
    try:
        made = make_inputs_of_shape(options.out, replace(SHAPES[options.size], **asked_for), options.seed)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(f"{made.train}: {made.train_rows} rows")
    print(f"{made.eval}: {made.eval_rows} rows about other subjects")
    print(f"{made.alpaca}")
    print(f"{made.model}: {made.parameters:,} parameters, {made.vocabulary} tokens")


if __name__ == "__main__":
    main()
