"""How much of a real model's greedy text n-grams of what is there already foretell.

    python -m tools.measure_lookup FILE.gguf
    python -m tools.measure_lookup FILE.gguf --answer 96 --json > answers.json
    python -m tools.measure_lookup answers.json --longest 3     # counts anew

The model (a GGUF file, or a folder) answers prompts of four kinds, made of this repository's own
code and documents: edits of code, summaries with quotes, chat, translations. Then prompt lookup is
played through on the tokens of these answers: the last tokens, ``--longest`` of them, else fewer
down to ``--shortest``, are looked for earlier in prompt and answer; the up to k tokens that
followed the latest place are a draft. As many of them are accepted as the answer goes on with, and
one pass of the model gives these and one token more. The drafts are those of molink's head; what
it gains by them in a ring ``tools.simulate_drafts`` shows.

Shown for each kind and k: tokens of a pass (of all answers; then the least, the median and the most
of one answer), the share of passes that had a draft, and the share of drafted tokens that were
accepted. Small models repeat themselves, which is easily foretold: with ``--no-loops`` an answer
counts only up to where eight tokens of it come a second time.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import NullCounter
from molink.gguf import block_formats as formats
from molink.gguf import ggml_types as blocks
from molink.gguf import header
from molink.gguf import split_files as parts
from molink.scheduler.speculation.prompt_lookup import MAX_NGRAM, PromptLookup
from molink.text.tokenizer import Tokenizer
from tools.greedy import greedy, whole_model
from tools.simulate_drafts import until_loop

_DOCS = Path(__file__).parents[1] / "docs"
#: Characters of a passage that a prompt has.
_PASSAGE = 700
_EDITS = (
    "Add a docstring to this function and give the whole code back.",
    "Rename the first parameter to `value` and give the whole code back.",
    "Add type hints where they are missing and give the whole code back.",
    "Add a comment above each return and give the whole code back.",
)
_QUESTIONS = (
    "What is a good way to learn the guitar?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Give me three ideas for dinner with potatoes.",
    "How does a bicycle stay upright?",
    "What should I see in Rome in one day?",
    "Tell me a story about a fox and a hen.",
    "How do I write a letter of application?",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of a prompt and of its greedy answer; ``ended`` by itself, or cut off."""

    kind: str
    prompt: list[int]
    tokens: list[int]
    ended: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """Of one answer with drafts of up to k tokens."""

    tokens: int
    passes: int
    with_draft: int
    drafted: int
    accepted: int


# --- prompts and answers ---------------------------------------------------------------------


def prompts() -> Iterator[tuple[str, str]]:
    """Kind and text of each; eight of a kind."""
    functions = [
        blocks.find_packed,
        blocks.packed_shape,
        formats.locate_pair,
        formats.stays,
        header.read_gguf,
        parts.model_name,
        parts.split_names,
        parts.find_splits,
    ]
    for index, function in enumerate(functions):
        code = inspect.getsource(function)
        yield "code edit", f"{_EDITS[index % len(_EDITS)]}\n\n```python\n{code}```"
    for name in ("guide", "reliability", "architecture", "development"):
        for passage in _passages(_DOCS / f"{name}.md", 2):
            yield (
                "summary with quotes",
                f"Summarize this text and quote its most important sentences:\n\n{passage}",
            )
    for question in _QUESTIONS:
        yield "chat", question
    for name in ("guide", "reliability", "performance", "models"):
        passages = _passages(_DOCS / f"{name}.md", 2)
        for language, passage in zip(("French", "German"), passages, strict=True):
            yield "translation", f"Translate into {language}:\n\n{passage[: _PASSAGE // 2]}"


def _passages(path: Path, count: int) -> list[str]:
    """The longest paragraphs of a document, cut; no tables."""
    text = path.read_text(encoding="utf-8")
    found = [one for one in text.split("\n\n") if not one.startswith(("|", "```", "#"))]
    return [one[:_PASSAGE] for one in sorted(found, key=len, reverse=True)[:count]]


def ask(path: Path, count: int, dtype: Any) -> list[Answer]:
    """The model's answers to all prompts, of up to ``count`` tokens."""
    folder, tokenizer = ModelFolder.open(path), Tokenizer.open(path)
    assert tokenizer.chat_template is not None
    asked = [
        (kind, tokenizer.encode(tokenizer.chat_template.render_prompt(messages), special=False))
        for kind, text in prompts()
        for messages in ([{"role": "user", "content": text}],)
    ]
    stage = whole_model(folder, max(len(prompt) for _, prompt in asked) + count, dtype)
    found = []
    for kind, prompt in asked:
        tokens = [token for token, _ in greedy(stage, prompt, count, tokenizer.eos_ids)]
        found.append(Answer(kind, prompt, tokens, tokens[-1] in tokenizer.eos_ids))
    return found


# --- drafts ----------------------------------------------------------------------------------


def play(answer: Answer, k: int, longest: int, shortest: int) -> Tally:
    """Prompt lookup over one answer; its first token comes with the prompt."""
    lookup = PromptLookup(longest)
    written, passes, with_draft, drafted, accepted = 1, 0, 0, 0, 0
    while written < len(answer.tokens):
        context = answer.prompt + answer.tokens[:written]
        foretold = lookup.propose_drafts(context, min(k, len(answer.tokens) - written))
        guess = foretold.tokens if foretold.evidence >= shortest else ()
        right = 0
        while right < len(guess) and guess[right] == answer.tokens[written + right]:
            right += 1
        passes += 1
        with_draft += bool(guess)
        drafted += len(guess)
        accepted += right
        written += min(right + 1, len(answer.tokens) - written)
    return Tally(len(answer.tokens) - 1, passes, with_draft, drafted, accepted)


def figures(answers: Sequence[Answer], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each kind and k."""
    for kind in dict.fromkeys(one.kind for one in answers):
        mine = [one for one in answers if one.kind == kind and len(one.tokens) > 1]
        for k in range(1, options.most + 1):
            found = [play(one, k, options.longest, options.shortest) for one in mine]
            each = sorted(one.tokens / one.passes for one in found)
            passes, drafted = sum(one.passes for one in found), sum(one.drafted for one in found)
            yield {
                "kind": kind,
                "answers": len(mine),
                "ended": sum(one.ended for one in mine),
                "tokens": sum(one.tokens for one in found),
                "k": k,
                "tokens a pass": round(sum(one.tokens for one in found) / passes, 2),
                "least": round(each[0], 2),
                "median": round(statistics.median(each), 2),
                "most": round(each[-1], 2),
                "with a draft": f"{sum(one.with_draft for one in found) / passes:.0%}",
                "accepted": f"{sum(one.accepted for one in found) / max(1, drafted):.0%}",
            }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", type=Path, help="GGUF file or folder, or answers of before (.json)"
    )
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--most", type=int, default=8, help="tokens of a draft")
    parser.add_argument("--longest", type=int, default=MAX_NGRAM, help="tokens that are looked for")
    parser.add_argument("--shortest", type=int, default=2)
    parser.add_argument("--no-loops", action="store_true", help="count up to the first loop only")
    parser.add_argument("--json", action="store_true", help="print the answers too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model.suffix == ".json":
        kept = json.loads(options.model.read_text(encoding="utf-8"))
        answers = [Answer(**one) for one in kept["answers"]]
    else:
        with tempfile.TemporaryDirectory() as room:
            path = options.model
            if path.is_file():
                path = import_gguf(path, Path(room), NullCounter(), threading.Event())
            answers = ask(path, options.answer, options.dtype)
    counted = [
        replace(one, tokens=list(until_loop(one.tokens))) if options.no_loops else one
        for one in answers
    ]
    rows = list(figures(counted, options))
    if options.json:
        print(json.dumps({"figures": rows, "answers": [asdict(one) for one in answers]}))
        return
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))


if __name__ == "__main__":
    main()
