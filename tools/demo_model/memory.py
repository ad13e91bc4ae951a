"""What the user said earlier, or asks to hear again, as topics."""

from __future__ import annotations

from tools.demo_model.topic import Then, Topic, plain, rows, wordings

_NAMES = rows(
    "name",
    """Anna; Ben; Clara; David; Emma; Felix; Greta; Hugo; Ida; Jonas; Kim; Lena; Max; Nina
Oscar; Paula; Robin; Sara; Tom; Alice; Bob; Peter; Mary; John; Lisa; Paul; Eva; Leo; Mia; Noah
Sam; Alex; Julia; Martin; Laura; Chris""",
)

_LIKES = rows(
    "kind thing",
    """colour|red; colour|blue; colour|green; colour|yellow; colour|purple; colour|orange
animal|the cat; animal|the dog; animal|the owl; animal|the horse; animal|the fox; food|pizza
food|pasta; food|soup; food|bread; food|cake; number|7; number|3; number|12; number|4
city|Paris; city|Rome; city|Berlin; city|London; city|Tokyo; season|summer; season|winter
season|spring; season|autumn""",
)

_WORDS = rows(
    "words",
    """red apple; blue sky; good morning; hello world; the cat sleeps; one two three
I love my swarm; green tea; the dog runs fast; stars and moon; big yellow bus; cold water
the owl is awake; my PC is new; summer is warm; small blue fish; pizza with cheese
the ring is closed; happy birthday; snow in winter""",
)

_MEMORY = (
    Topic(
        "my_name",
        wordings("""My name is {name}. | I am {name}. | I'm {name}. | Hello, my name is {name}.
Hi, I am {name}. | Call me {name}. | Hello there, my name is {name}. | Hey, I am {name}.
Hello, I am {name}. | Good morning, I am {name}. | You can call me {name}."""),
        ("Nice to meet you, {name}! What would you like to know?",),
        _NAMES,
        then=(
            Then(
                wordings("""What is my name? | Do you remember my name? | What's my name?
Who am I? | Tell me my name. | Do you know my name?"""),
                ("Your name is {name}.",),
            ),
        ),
        held_out=("Hello there, I am {name}.",),
        keywords=("{name}",),
        weight=4,
    ),
    Topic(
        "my_favourite",
        wordings("""My favourite {kind} is {thing}.
I like {thing}. It is my favourite {kind}. | {thing} is my favourite {kind}.
My very favourite {kind} is {thing}. | I love {thing}, my favourite {kind}."""),
        ("{thing} is a good choice! I will remember it as long as we talk.",),
        _LIKES,
        then=(
            Then(
                wordings("""What is my favourite {kind}? | Which is my favourite {kind}?
Do you remember my favourite {kind}?"""),
                ("Your favourite {kind} is {thing}.",),
            ),
        ),
        held_out=("My most favourite {kind} is {thing}.",),
        keywords=("{thing}",),
        weight=3,
    ),
    Topic(
        "say",
        wordings("""Say: {words} | Can you repeat: {words} | Could you say: {words}
Just say: {words} | Repeat after me: {words} | Repeat: {words} | Please say: {words}"""),
        ("{words}",),
        _WORDS,
        held_out=("Can you say: {words}",),
        keywords=("{words}",),
        weight=3,
    ),
    plain(
        "my_name_unknown",
        "What is my name?\nDo you know my name?\nWho am I?\nWhat's my name?",
        ("You have not told me your name yet.",),
        weight=0.7,
    ),
)


def topics() -> list[Topic]:
    """All topics that need the conversation so far."""
    return list(_MEMORY)
