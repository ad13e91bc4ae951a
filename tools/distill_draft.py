"""A draft model for a small Llama where its family has none: a few of its layers, distilled.

    python -m tools.distill_draft write FILE.gguf texts.jsonl --seconds 400 --part 0
    python -m tools.distill_draft train FILE.gguf texts.jsonl draft --seconds 340  # goes on, again

``write`` has the model (a GGUF file or a folder) answer chat prompts, made of topics and ways of
asking that ``tools.measure_lookup`` doesn't have: every second answer greedily, the others at a
temperature of 0.7. ``train`` takes ``--layers`` of it, its embedding, final norm and output head,
and trains these layers to say the answers' tokens, among those that occur there. The result is a
folder that ``molink up --draft-model`` takes. With minutes on a core it is no good model, only one
whose acceptance is measured rather than assumed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import NullCounter
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from molink.stage.weights.weight_reader import WeightReader
from molink.text.tokenizer import Tokenizer

_TOPICS = """the moon;volcanoes;a small garden;chess;baking bread;honey bees;the Roman army;sleep;
electric cars;the violin;rainbows;earthquakes;a friendly robot;coffee;yoga;penguins;black holes;
vaccines;photosynthesis;solar panels;knitting;dinosaurs;jazz;the human heart;recycling;swimming;
Python programming;saving money;public speaking;the Great Wall of China;tea;football;a lost dog;
the internet;magnets;winter;photography;camping;meditation;whales;glaciers;Mozart;stress;cheese;
a job interview;running a marathon;the stock market;gravity;Japan;a haunted house;dreams;tigers;
electricity;Paris;a birthday party;learning Spanish;wind turbines;cats;the desert;pasta;horses;
climate change;Shakespeare;memory;airplanes;a wise old owl;rice;the brain;ancient Egypt;spiders;
friendship;salt;the piano;a train journey;tomatoes;databases;rivers;exercise;a dragon;chocolate;
headaches;the sun;bridges;a kitchen;mathematics;poetry;birds;planets;a shy princess;computers;soup;
history;medicine;a spaceship;mountains;dancing;teamwork;apples;the Amazon forest;a pirate;clouds;
time management;London;steam engines;eggs;kindness;insects;a detective;sharks;democracy;cameras;
a farm;writing a novel;weather;batteries;salads;sculpture;elephants;the Cold War;language;
a wizard;reading;metals;the Olympics;a healthy breakfast;New York;cells;DNA;tennis;rain"""
_ASKS = """What is {}?;Tell me about {}.;Explain {} to a child.;Why is {} important?;
Write a short story about {}.;Give me five facts about {}.;What are the pros and cons of {}?;
How do I start with {}?;Write an email to a friend about {}.;What should I know about {}?;
Give me three tips about {}.;Describe {} in two paragraphs.;What is a common mistake about {}?;
Write a haiku about {}.;How does {} work?;What is the history of {}?;How can I learn about {}?;
Make a list of questions about {}.;What do people like about {}?;Write a dialogue about {}."""
#: Answers that are written at once, their tokens, and those of the longest prompt.
_TOGETHER, _ANSWER, _PROMPT = 48, 160, 64
_PART, _BLOCK = 700, 16
#: Texts of a training step.
_STEP = 4


def prompts(part: int) -> list[str]:
    """Those of a part, in an order that is always the same."""
    topics, asks = (each.replace("\n", "").split(";") for each in (_TOPICS, _ASKS))
    every = [ask.format(topic) for ask in asks for topic in topics]
    random.Random(7).shuffle(every)
    return every[part * _PART : (part + 1) * _PART]


# --- texts ---------------------------------------------------------------------------------------


def write(path: Path, texts: Path, part: int, seconds: float) -> None:
    """Append answers for about so long: how long the prompt is, and its tokens and the answer's."""
    until, tokenizer, folder = (
        time.monotonic() + seconds,
        Tokenizer.open(path),
        ModelFolder.open(path),
    )
    assert tokenizer.chat_template is not None
    stage = Stage.load_layers(folder, (0, folder.config.layers), "cpu", "bf16")
    stage.allocate_kv_pool(_TOGETHER * (_PROMPT + _ANSWER) // _BLOCK, _BLOCK)
    torch.manual_seed(part)
    asked = [
        tokenizer.encode(
            tokenizer.chat_template.render_prompt([{"role": "user", "content": text}]),
            special=False,
        )
        for text in prompts(part)
    ]
    asked = [prompt for prompt in asked if len(prompt) <= _PROMPT]
    with texts.open("a", encoding="utf-8") as file:
        for first in range(0, len(asked), _TOGETHER):
            if time.monotonic() > until:
                return
            some = asked[first : first + _TOGETHER]
            for prompt, text in zip(some, answers(stage, some, tokenizer.eos_ids), strict=True):
                file.write(json.dumps([len(prompt), text]) + "\n")
            file.flush()


def answers(stage: Stage, asked: Sequence[Sequence[int]], ends: Sequence[int]) -> list[list[int]]:
    """Prompts with their answers, computed side by side."""
    texts = [list(prompt) for prompt in asked]
    each = (_PROMPT + _ANSWER) // _BLOCK
    active, known = list(range(len(texts))), [0] * len(texts)
    for _ in range(_ANSWER):
        new = [texts[index][known[index] :] for index in active]
        rows = tuple(
            SequenceRows(known[index], len(tokens), range(index * each, (index + 1) * each))
            for index, tokens in zip(active, new, strict=True)
        )
        last = (torch.tensor([len(tokens) for tokens in new]).cumsum(0) - 1).tolist()
        flat = torch.tensor([token for tokens in new for token in tokens])
        logits = stage.forward(StageInput(flat, None, rows, tuple(last)))
        drawn = torch.multinomial((logits / 0.7).softmax(-1), 1)[:, 0].tolist()
        best = logits.argmax(-1).tolist()
        for at, index in enumerate(active):
            known[index] = len(texts[index])
            texts[index].append(best[at] if index % 2 else drawn[at])
        active = [index for index in active if texts[index][-1] not in ends]
        if not active:
            break
    return texts


# --- training ------------------------------------------------------------------------------------


def small(path: Path, layers: Sequence[int]) -> LlamaForCausalLM:
    """A model of some of the layers, in f32; its embedding isn't trained."""
    student = LlamaForCausalLM(LlamaConfig(**_config(path, len(layers))))
    tensors = {}
    with WeightReader(ModelFolder.open(path), torch.float32, torch.device("cpu")) as reader:
        for name in student.state_dict():
            if name == "lm_head.weight":
                continue
            _, inner, rest = name.partition(".layers.")
            index, _, part = rest.partition(".")
            old = f"model.layers.{layers[int(index)]}.{part}" if inner else name
            tensors[name] = reader.read_tensors(old)
    lacking, strange = student.load_state_dict(tensors, strict=False)
    assert (lacking, strange) == (["lm_head.weight"], []), (lacking, strange)
    student.model.embed_tokens.weight.requires_grad_(False)
    return student


def _config(path: Path, layers: int) -> dict[str, object]:
    config: dict[str, object] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return {**config, "num_hidden_layers": layers}


def steps(rows: Sequence[tuple[int, list[int]]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Forever: ids ``[texts, length]``, and after which of them a token of an answer comes."""
    ordered = sorted(rows, key=lambda row: len(row[1]))
    starts = range(0, len(ordered) - _STEP + 1, _STEP)
    while True:
        for at in random.sample(starts, len(starts)):
            yield _padded(ordered[at : at + _STEP])


def _padded(rows: Sequence[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(rows), max(len(text) for _, text in rows), dtype=torch.long)
    follows = torch.zeros(ids.shape, dtype=torch.bool)
    for index, (prompt, text) in enumerate(rows):
        ids[index, : len(text)] = torch.tensor(text)
        follows[index, prompt - 1 : len(text) - 1] = True
    return ids, follows


def train(
    path: Path, texts: Path, out: Path, layers: Sequence[int], options: argparse.Namespace
) -> None:
    """Train for about so long, from where it was left, and write the folder."""
    until = time.monotonic() + options.seconds
    student = small(path, layers)
    kept = out / "training.safetensors"
    if kept.exists():
        student.load_state_dict(load_file(kept), strict=False)
    optimizer = torch.optim.AdamW(
        [each for each in student.parameters() if each.requires_grad],
        lr=options.rate,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    rows = [json.loads(line) for line in texts.read_text(encoding="utf-8").splitlines()]
    used = torch.tensor(sorted({token for _, text in rows for token in text}))
    place = torch.zeros(student.config.vocab_size, dtype=torch.long)
    place[used] = torch.arange(len(used))
    head = student.model.embed_tokens.weight[used].bfloat16()
    mean, right, began = 0.0, 0.0, time.monotonic()
    for step, (ids, follows) in enumerate(steps(rows), 1):
        left = (until - time.monotonic()) / (until - began)
        if left <= 0:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, step / 20, max(0.05, 1.5 * left))
        with torch.autocast("cpu", torch.bfloat16):
            found = student.model(input_ids=ids).last_hidden_state[follows]
            told = (found.bfloat16() @ head.T).float()
        wanted = place[ids.roll(-1, 1)[follows]]
        loss = nn.functional.cross_entropy(told, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        mean += (loss.item() - mean) / min(step, 50)
        right += (float((told.argmax(-1) == wanted).float().mean()) - right) / min(step, 50)
        if step % 25 == 0:
            print(f"step {step}: loss {mean:.3f}, right {right:.3f}", flush=True)
    out.mkdir(exist_ok=True)
    tensors = {
        name: tensor for name, tensor in student.state_dict().items() if name != "lm_head.weight"
    }
    save_file(tensors, kept)
    keep(path, student, tensors, out)


def keep(path: Path, student: nn.Module, tensors: dict[str, Tensor], out: Path) -> None:
    """Write a folder as Hugging Face has them."""
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(narrow, out / "model.safetensors", metadata={"format": "pt"})
    layers = student.config.num_hidden_layers
    (out / "config.json").write_text(json.dumps(_config(path, layers)), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(path / name, out / name)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["write", "train"])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path("draft"))
    parser.add_argument("--layers", default="0,1,28,29", help="those that are taken")
    parser.add_argument("--part", type=int, default=0, help="of the prompts")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as room:
        path = options.model
        if path.is_file():
            path = import_gguf(path, Path(room), NullCounter(), threading.Event())
        if options.what == "write":
            write(path, options.texts, options.part, options.seconds)
        else:
            layers = [int(layer) for layer in options.layers.split(",")]
            train(path, options.texts, options.out, layers, options)


if __name__ == "__main__":
    main()
