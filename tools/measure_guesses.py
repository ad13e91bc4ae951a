"""What a draft model is right about, on answers of the model that it drafts for.

    python -m tools.measure_guesses DRAFT_FOLDER > docs/results/guesses.json
    python -m tools.measure_guesses docs/results/guesses.json      # the table again

The answers are those that ``tools.measure_lookup`` keeps (``docs/results/lookup.json``), up to
their first loop. From each of their tokens on the draft model guesses the next eight, greedily, by
the code that a worker has for it. Kept are how many of these are right, up to the first that isn't,
and the chance that it gave each, in percent.

Shown for each kind and k: of k guesses how many are right, tokens of a pass, and how often the
first guess is right, beside the mean of the chances that it had. ``tools.simulate_drafts
--draft-model`` shows what that brings in a ring.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.drafts import DraftBatch, DraftRequest
from molink.scheduler.speculation.draft_model_queue import MAX_MODEL_DRAFTS
from molink.sim.known_text import KnownText
from molink.stage.stage import Stage
from molinkd.worker.draft_proposer import DraftProposer
from tools.simulate_drafts import ANSWERS, known_texts

_BLOCK = 16
#: Of one position: how many guesses are right, and the chance of each in percent.
Guessed = tuple[int, Sequence[int]]


def guess(drafter: DraftProposer, texts: Sequence[KnownText]) -> list[list[Guessed]]:
    """For each text and each token of its answer, what is guessed from there on."""
    found: list[list[Guessed]] = [[] for _ in texts]
    for at in range(max(len(text.answer) for text in texts)):
        asks = []
        for number, text in enumerate(texts):
            if at < len(text.answer):
                new = text.answer[at - 1 : at] if at else text.prompt
                known = len(text.prompt) + at - 1 if at else 0
                asks.append(DraftRequest(number, known, new, MAX_MODEL_DRAFTS))
        for guessed in drafter.propose_drafts(DraftBatch(asks)):
            rest = texts[guessed.request].answer[at:]
            pairs = enumerate(zip(guessed.tokens, rest, strict=False))
            length = min(len(guessed.tokens), len(rest))
            right = next((index for index, (one, other) in pairs if one != other), length)
            chances = [round(100 * chance) for chance in guessed.probabilities]
            found[guessed.request].append((right, chances))
    return found


def table(answers: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each kind and k; of an answer's first token, which comes with the prompt, none."""
    for kind in dict.fromkeys(one["kind"] for one in answers):
        mine = [one["guesses"][1:] for one in answers if one["kind"] == kind]
        firsts = [each for guesses in mine for each in guesses]
        for k in (1, 2, 3, 4, 8):
            passes = tokens = accepted = drafted = 0
            for guesses in mine:
                at = 0
                while at < len(guesses):
                    right, chances = guesses[at]
                    taken = min(right, k, len(guesses) - at - 1)
                    passes, tokens = passes + 1, tokens + taken + 1
                    accepted, drafted = accepted + taken, drafted + min(k, len(chances))
                    at += taken + 1
            yield {
                "kind": kind,
                "k": k,
                "tokens a pass": round(tokens / passes, 2),
                "accepted": f"{accepted / drafted:.0%}",
                "first right": f"{sum(right > 0 for right, _ in firsts) / len(firsts):.0%}",
                "its chance": f"{sum(each[0] for _, each in firsts) / len(firsts):.0f}%",
            }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("draft", type=Path, help="folder of the draft model, or kept guesses")
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    if options.draft.suffix == ".json":
        for row in table(json.loads(options.draft.read_text(encoding="utf-8"))["answers"]):
            print(" | ".join(str(value) for value in row.values()))
        return
    torch.set_num_threads(1)
    folder = ModelFolder.open(options.draft)
    stage = Stage.load_layers(folder, (0, folder.config.layers), "cpu", options.dtype)
    answers = []
    for kind, texts in known_texts(options.answers, loops=False).items():
        tokens = sum(
            len(text.prompt) + len(text.answer) + MAX_MODEL_DRAFTS + _BLOCK for text in texts
        )
        drafter = DraftProposer(stage, tokens // _BLOCK, _BLOCK, folder.config.vocab_size)
        found = guess(drafter, texts)
        answers += [{"kind": kind, "guesses": guesses} for guesses in found]
    print(json.dumps({"figures": list(table(answers)), "answers": answers}))


if __name__ == "__main__":
    main()
