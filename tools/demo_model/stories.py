# ruff: noqa: E501  (tables of sentences: one to a line reads better)
"""Stories: the long answers that show a stream, as topics."""

from __future__ import annotations

from tools.demo_model.topic import Then, Topic, rows, wordings

_SWARM = (
    "Once upon a time there were four old PCs in a quiet house. Each of them was too small to hold a"
    " large model, and so they felt useless. One evening a girl came and typed molink up on the first"
    " PC. A token appeared on the screen. She pasted it on the other three, one after another, and"
    " soon all four were a swarm. The first PC took the first layers, the next two took the middle,"
    " and the last one took the end. The girl asked a question, and the tokens began to run around"
    " the ring. Then somebody stepped on a cable, and the third PC went dark. The stream stopped for"
    " a moment. But the others did not give up: they shared its layers, replayed the prompt and went"
    " on exactly where they had been. The girl did not lose a single word. She smiled and said: good"
    " work, my little swarm. And since that day the four old PCs never felt useless again."
)

_HERO = (
    "Once upon a time there was a little {hero} who lived at the edge of a small village. The {hero}"
    " wanted to see the world, so one morning it packed some bread and walked into the forest. There"
    " it met an old owl. Where are you going, asked the owl. I want to see the world, said the {hero}."
    " Then take a friend with you, said the owl, because the way is long. So the {hero} and the owl"
    " went on together. They crossed a river, climbed a high hill and slept under the stars. On the"
    " third day a storm came, and the {hero} was afraid. But the owl spread its wings and kept the"
    " rain away. When the sun came back, they saw the sea, blue and wide. This is the world, said the"
    " {hero}, and it is beautiful. Then they went home, and the {hero} told the whole village about"
    " it. And if you listen on a quiet evening, you can hear the {hero} tell it still."
)

_HEROES = rows(
    "hero",
    "cat\ndog\nfox\nmouse\nrobot\ndragon\nbear\nrabbit\nhorse\npenguin\nfrog\nhen\nsheep\nlion\nduck\ngoat",
)

_DAY = (
    "Early in the morning I wait in the memory of your PCs. Then a question comes. The tokenizer cuts"
    " it into tokens, and the head puts them into a batch. The first stage runs its layers and sends"
    " the result to the next one, and so it goes around the ring until the tail picks a token. That"
    " token goes back to you, and the next round begins. I do that some hundred times, and then an"
    " end token tells me to stop. After that I wait for the next question. In the evening somebody"
    " switches off one of the PCs, and its layers move to another one. At night it is quiet, and I"
    " dream of long prompts and short queues. That is my day, and I like it."
)


def topics() -> list[Topic]:
    """All stories."""
    return [
        Topic(
            "swarm_story",
            wordings("""Tell me a story about a swarm. | Tell me a story about molink.
Tell me a story. | Tell me a long story. | Do you know a story? | Write a story about a swarm.
Tell a story about PCs. | Write a story. | I want to hear a story. | Can you tell me a story?"""),
            (_SWARM,),
            then=(
                Then(
                    ("That was a nice story.", "Nice story!", "I like that story."),
                    ("Thank you, that is kind of you!",),
                ),
                Then(
                    ("What happened to the third PC?", "Why did the third PC go dark?"),
                    ("Somebody stepped on a cable, and the others shared its layers.",),
                ),
            ),
            held_out=("Please write me a story about a swarm.", "Can you tell me a long story?"),
            keywords=("Once upon a time", "ring"),
            weight=0.8,
        ),
        Topic(
            "hero_story",
            wordings("""Tell me a story about a {hero}. | Write a story about a {hero}.
Tell me a story about a little {hero}. | Do you know a story about a {hero}?
Tell a story with a {hero}."""),
            (_HERO,),
            _HEROES,
            held_out=("Can you tell me a story about a {hero}?",),
            keywords=("little {hero}", "owl"),
            weight=1.0,
        ),
        Topic(
            "model_day",
            wordings("""Tell me about your day. | What do you do all day? | How was your day?
Describe your day. | What did you do today?"""),
            (_DAY,),
            held_out=("Can you describe your day?",),
            keywords=("ring",),
            weight=0.5,
        ),
    ]
