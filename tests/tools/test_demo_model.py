"""The bundled model answers, stops, and beats an n-gram model of its corpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2ForCausalLM

from tools.demo_model.corpus import Conversation, Corpus, all_topics, held_out_questions
from tools.demo_model.evaluate import (
    answer_greedily,
    check_paraphrases,
    compare_perplexity,
    make_check,
)
from tools.demo_model.network import load_network
from tools.demo_model.ngram import NGram
from tools.demo_model.tokenizer import (
    encode_conversations,
    load_tokenizer,
    mark_answers,
    render_text,
)
from tools.demo_model.train import (
    TRAIN_SIZE,
    Plan,
    refine_model,
    select_conversations,
    select_refinement,
    train_model,
)
from tools.train_demo_model import FOLDER

SEED = 7
MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def network() -> Qwen2ForCausalLM:
    return load_network(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FOLDER)


def test_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) <= 12 * MEBIBYTE
    wanted = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert wanted | {"tokenizer.json", "tokenizer_config.json", "EVALUATION.json"} <= set(sizes)


def test_corpus_is_determined_by_seed() -> None:
    def digest(seed: int) -> str:
        talks = list(islice(Corpus(seed).conversations("train"), 300))
        return hashlib.sha256(json.dumps(talks).encode()).hexdigest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_splits_share_no_conversation() -> None:
    trained = set(map(repr, select_conversations("train", 5000, SEED)))
    assert not trained & set(map(repr, select_conversations("held_out", 100, SEED)))


def test_held_out_wordings_are_not_trained() -> None:
    def plain(text: str) -> str:
        return text.lower().rstrip("?.!")

    for topic in all_topics():
        trained = {plain(text) for text in topic.questions}
        assert trained.isdisjoint(map(plain, topic.held_out)), topic.name
    talks = [*select_conversations("train", 3000, SEED), *select_refinement(SEED)]
    said = {plain(turn["content"]) for talk in talks for turn in talk if turn["role"] == "user"}
    assert said.isdisjoint(held_out_questions(all_topics()))


def test_loss_mask_covers_assistant_tokens(tokenizer: Tokenizer) -> None:
    talk: Conversation = (
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "2 + 3 = 5."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "You are welcome!"},
    )
    (ids,) = encode_conversations(tokenizer, [talk])
    said = ids[mark_answers(tokenizer, ids)].tolist()
    assert tokenizer.decode(said, skip_special_tokens=False) == (
        "2 + 3 = 5.<|im_end|>You are welcome!<|im_end|>"
    )


def test_folder_has_training_chat_template(tokenizer: Tokenizer) -> None:
    talk = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"})
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    text = theirs.apply_chat_template(list(talk), tokenize=False, add_generation_prompt=True)
    assert text == render_text(talk, ask=True)
    assert theirs.encode(text) == tokenizer.encode(text).ids
    assert theirs.eos_token == "<|im_end|>"


def test_ngram_probabilities_sum_to_one() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 12, size=60) for _ in range(20)]
    model = NGram(texts, vocabulary=12, pad=11)
    for context in ([3, 4, 5, 6], [1], [2, 2, 2, 2, 2, 2]):
        last = [model.log_probabilities(np.array([*context, token]))[-1] for token in range(12)]
        assert np.exp(last).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("topic", ["what_is_molink", "add_pc", "dies", "capital", "who", "bye"])
def test_topics_have_held_out_wordings(topic: str) -> None:
    assert any(check.topic == topic for check in check_paraphrases(1))


def test_answers_unseen_questions_and_stops(
    network: Qwen2ForCausalLM, tokenizer: Tokenizer
) -> None:
    checks = [
        make_check(
            "what_is_molink", "Please explain to me what molink is.", "PCs", "stage", "ring"
        ),
        make_check("add_pc", "How can I add another computer to the swarm?", "molink join"),
        make_check("start", "What do I type to start molink?", "molink up"),
        make_check("status", "How can I check the status of the swarm?", "molink status"),
        make_check("dies", "What happens when a computer dies?", "stage", "stream"),
        make_check("decode", "Can you explain why decode data goes first?", "prefill"),
        make_check("privacy", "Who can read what I write?", "read prompts"),
        make_check("capital", "Give me the name of the capital of Norway.", "Oslo"),
        make_check("opposite", "Name the opposite of the word hot.", "cold"),
        make_check("add", "Do you know how much 7 + 5 is?", "12"),
        make_check("who", "Can you tell me who you are?", "demo model"),
        make_check("bye", "Bye, see you tomorrow!", "Goodbye"),
    ]
    answers = answer_greedily(network, tokenizer, [check.messages for check in checks], limit=120)
    failed = {
        check.messages[-1]["content"]: answer.text
        for check, answer in zip(checks, answers, strict=True)
        if not check.passed(answer.text)
    }
    assert not failed
    assert all(answer.stopped for answer in answers)


def test_follows_a_conversation(network: Qwen2ForCausalLM, tokenizer: Tokenizer) -> None:
    capital: Conversation = (
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
    )
    token: Conversation = (
        {"role": "user", "content": "How do I add a PC?"},
        {"role": "assistant", "content": "Run molink join on the new PC: it shows a code."},
        {"role": "user", "content": "Where do I get a token?"},
    )
    rome, printed = answer_greedily(network, tokenizer, [capital, token], limit=40)
    assert "Rome" in rome.text
    assert "molink invite" in printed.text


def test_tells_a_long_story(network: Qwen2ForCausalLM, tokenizer: Tokenizer) -> None:
    asked: Conversation = ({"role": "user", "content": "Tell me a story about a swarm"},)
    (story,) = answer_greedily(network, tokenizer, [asked])
    assert story.stopped
    assert len(tokenizer.encode(story.text).ids) >= 150


@pytest.mark.slow  # the model's file changes only when it is retrained
def test_perplexity_is_below_a_five_gram(network: Qwen2ForCausalLM, tokenizer: Tokenizer) -> None:
    trained = [*select_conversations("train", TRAIN_SIZE, SEED), *select_refinement(SEED)]
    held_out = select_conversations("held_out", 80, SEED)
    ours, rival = compare_perplexity(network, tokenizer, trained, held_out)
    assert ours.all_tokens < rival.all_tokens
    assert ours.answer_tokens < rival.answer_tokens


@pytest.mark.slow
def test_training_is_determined_by_seed(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        train_model(tmp_path / name, Plan(steps=3, seed=seed), train_size=8000)
        refine_model(tmp_path / name, Plan(steps=2, seed=seed))
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert weights("a", 3) == weights("b", 3)
    assert weights("c", 4) != weights("d", 3)
