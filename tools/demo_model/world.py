"""Simple facts about the world, as topics."""

from __future__ import annotations

from tools.demo_model import facts
from tools.demo_model.topic import Then, Topic, wordings

_GEOGRAPHY = (
    Topic(
        "capital",
        wordings("""What is the capital of {country}? | What's the capital of {country}?
Which city is the capital of {country}? | Give me the capital of {country}.
Say which city is the capital of {country}. | What is the name of the capital of {country}?
Tell me the capital of {country}. | capital of {country} | Name the capital of {country}.
Do you know the capital of {country}? | What is the capital city of {country}?
{country}: what is its capital? | What city is the capital of {country}?
I want to know the capital of {country}."""),
        ("The capital of {country} is {capital}.",),
        (*facts.CAPITALS, *facts.OTHER_NAMES),
        wordings("""And of {country}? | What about {country}? | And {country}?
How about {country}?"""),
        held_out=wordings("""Can you say which city is the capital city of {country}?
Give me the name of the capital of {country}."""),
        keywords=("{capital}",),
        weight=12,
    ),
    Topic(
        "country_of_capital",
        wordings("""{capital} is the capital of which country?
Which country has the capital {capital}? | What country is {capital} the capital of?
In which country is {capital}? | Of which country is {capital} the capital?
{capital} is the capital city of which country? | Where is {capital}?"""),
        ("{capital} is the capital of {country}.",),
        facts.CAPITALS,
        ("And {capital}?", "What about {capital}?"),
        held_out=("Of which country is {capital} the capital city?",),
        keywords=("{country}",),
        weight=6,
    ),
)

_NATURE = (
    Topic(
        "legs",
        wordings("""How many legs does {a} {animal} have? | How many legs has {a} {animal}?
Number of legs of {a} {animal}? | Tell me how many legs {a} {animal} has.
Do you know how many legs {a} {animal} has?"""),
        ("{a} {animal} has {legs} legs.",),
        facts.animal_legs(),
        ("And {a} {animal}?", "What about {a} {animal}?", "How about {a} {animal}?"),
        held_out=("What is the number of legs {a} {animal} has?",),
        keywords=("{legs}",),
        weight=5,
    ),
    Topic(
        "sound",
        wordings("""What sound does a {animal} make? | What does a {animal} say?
Which sound does a {animal} make? | How does a {animal} sound?
What noise does a {animal} make?"""),
        ("A {animal} says {sound}.",),
        facts.ANIMALS,
        ("And a {animal}?", "What about a {animal}?"),
        held_out=("Tell me what sound a {animal} makes.",),
        keywords=("{sound}",),
        weight=2,
    ),
    Topic(
        "young",
        wordings("""What is a baby {animal} called? | What do you call a baby {animal}?
What is the name of a young {animal}? | What is a young {animal} called?"""),
        ("A baby {animal} is called a {baby}.",),
        facts.ANIMALS,
        ("And a baby {animal}?", "What about a {animal}?"),
        held_out=("How do you call a young {animal}?",),
        keywords=("{baby}",),
        weight=2,
    ),
    Topic(
        "home",
        wordings("""Where does {animal} live? | Do you know the home of {animal}?
Can you tell me where {animal} lives? | Where do I find {animal}?
Tell me where {animal} lives. | In which place does {animal} live?"""),
        ("{animal} lives {home}.",),
        facts.HOMES,
        ("And {animal}?", "What about {animal}?"),
        held_out=("Do you know where {animal} lives?",),
        keywords=("{home}",),
        weight=1.5,
    ),
    Topic(
        "made_of",
        wordings("""What is {product} made from? | Can you tell me where {product} comes from?
Where does {product} come from? | Where do we get {product} from?
What do you need to make {product}?"""),
        ("{product} comes from {origin}.",),
        facts.MAKERS,
        ("And {product}?", "What about {product}?"),
        held_out=("Tell me where {product} comes from.",),
        keywords=("{origin}",),
        weight=1.5,
    ),
    Topic(
        "colour",
        wordings("""What colour {verb} {thing}? | What color {verb} {thing}?
Which colour {verb} {thing}? | Which colour does {thing} have? | Tell me the colour of {thing}.
What is the colour of {thing}? | What is the color of {thing}?"""),
        ("{thing} {verb} {colour}.",),
        facts.COLOURS,
        ("And {thing}?", "What about {thing}?", "How about {thing}?"),
        held_out=("Do you know what colour {thing} {verb}?",),
        keywords=("{colour}",),
        weight=3,
    ),
    Topic(
        "mix",
        wordings("""What do you get when you mix {one} and {two}? | Mix {one} and {two}.
I mix {one} with {two}. What do I get? | If I mix {one} and {two}, what do I get?
What colour is {one} mixed with {two}? | What colour do {one} and {two} make?
What is {one} plus {two}?"""),
        ("{one} and {two} make {mix}.",),
        facts.MIXES,
        ("And {one} and {two}?", "What about {one} and {two}?"),
        held_out=("If I mix {one} with {two}, what do I get?",),
        keywords=("{mix}",),
        weight=2,
    ),
)

_WORDS = (
    Topic(
        "opposite",
        wordings("""What is the opposite of {word}? | What's the opposite of {word}?
Opposite of {word}? | Name the opposite of {word}. | What is the opposite of the word {word}?
Tell me the opposite of {word}. | Which word is the opposite of {word}?
What is the contrary of {word}?"""),
        ("The opposite of {word} is {opposite}.",),
        facts.opposites(),
        ("And of {word}?", "What about {word}?", "And {word}?"),
        held_out=("Name the opposite of the word {word}.",),
        keywords=("{opposite}",),
        weight=6,
    ),
    Topic(
        "translation",
        wordings("""How do you say {word} in {language}? | What is {word} in {language}?
What is the {language} word for {word}? | Translate {word} to {language}.
What is the word for {word} in {language}? | Tell me {word} in {language}.
Translate {word} into {language}. | Say {word} in {language}."""),
        ('"{word}" in {language} is "{translation}".',),
        facts.WORDS,
        ("And {word} in {language}?", "What about {word} in {language}?"),
        held_out=("Tell me the word for {word} in {language}.",),
        keywords=("{translation}",),
        weight=4.5,
    ),
)

_COUNTS = (
    Topic(
        "amount",
        wordings("""How many {things} are in {whole}? | How many {things} are there in {whole}?
How many {things} does {whole} have? | How many {things} has {whole}?
Can you tell me how many {things} are in {whole}? | Tell me how many {things} {whole} has.
Do you know how many {things} are in {whole}?"""),
        ("There are {number} {things} in {whole}.",),
        facts.AMOUNTS,
        ("And how many {things} in {whole}?", "How many {things} in {whole}?"),
        held_out=("Tell me how many {things} there are in {whole}.",),
        keywords=("{number}",),
        weight=3.5,
    ),
    Topic(
        "sides",
        wordings("""How many sides does {shape} have? | How many sides has {shape}?
Number of sides of {shape}? | Tell me how many sides {shape} has."""),
        ("{shape} has {number} sides.",),
        facts.SHAPES,
        ("And {shape}?", "What about {shape}?"),
        held_out=("Do you know how many sides {shape} has?",),
        keywords=("{number}",),
        weight=1.5,
    ),
)

_SUN_AND_MOON = (
    Topic(
        "sun",
        ("What is the sun?", "Is the sun a star?", "What kind of thing is the sun?"),
        ("The sun is a star. All the planets of the solar system go around it.",),
        then=(
            Then(
                ("How hot is it?", "Is it hot?"), ("It is very hot. More I do not know about it.",)
            ),
        ),
        held_out=("Tell me what the sun is.",),
        keywords=("star",),
        weight=0.6,
    ),
    Topic(
        "moon",
        ("What is the moon?", "What does the moon do?", "Tell me about the moon."),
        ("The moon is a ball of rock that goes around the Earth about once a month.",),
        held_out=("What do you know about the moon?",),
        keywords=("Earth",),
        weight=0.6,
    ),
)


def topics() -> list[Topic]:
    """All topics about the world."""
    return [*_GEOGRAPHY, *_NATURE, *_WORDS, *_COUNTS, *_SUN_AND_MOON]
