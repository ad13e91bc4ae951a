"""Simple facts about the world, as topics."""

from __future__ import annotations

from tools.demo_model.topic import Slots, Then, Topic, rows

CAPITALS = rows(
    "country capital",
    """
France|Paris
Italy|Rome
Spain|Madrid
Germany|Berlin
Portugal|Lisbon
Austria|Vienna
Switzerland|Bern
Belgium|Brussels
the Netherlands|Amsterdam
Denmark|Copenhagen
Sweden|Stockholm
Norway|Oslo
Finland|Helsinki
Iceland|Reykjavik
Ireland|Dublin
England|London
Scotland|Edinburgh
Poland|Warsaw
Hungary|Budapest
Greece|Athens
Turkey|Ankara
Russia|Moscow
Ukraine|Kyiv
Romania|Bucharest
Bulgaria|Sofia
Croatia|Zagreb
Serbia|Belgrade
Estonia|Tallinn
Latvia|Riga
Egypt|Cairo
Kenya|Nairobi
Morocco|Rabat
Ethiopia|Addis Ababa
Ghana|Accra
China|Beijing
Japan|Tokyo
South Korea|Seoul
India|New Delhi
Thailand|Bangkok
Vietnam|Hanoi
Indonesia|Jakarta
Iran|Tehran
Iraq|Baghdad
Israel|Jerusalem
Australia|Canberra
New Zealand|Wellington
Canada|Ottawa
the United States|Washington
Mexico|Mexico City
Cuba|Havana
Brazil|Brasilia
Argentina|Buenos Aires
Chile|Santiago
Peru|Lima
Colombia|Bogota
""",
)

OPPOSITES = """
hot|cold
big|small
tall|short
fast|slow
happy|sad
day|night
up|down
left|right
open|closed
full|empty
old|new
early|late
rich|poor
strong|weak
light|dark
wet|dry
good|bad
hard|soft
high|low
near|far
thick|thin
clean|dirty
loud|quiet
deep|shallow
true|false
yes|no
start|end
inside|outside
above|below
before|after
first|last
win|lose
buy|sell
push|pull
love|hate
awake|asleep
black|white
wide|narrow
"""

ANIMALS = rows(
    "animal legs sound baby",
    """
dog|four|woof|puppy
cat|four|meow|kitten
cow|four|moo|calf
sheep|four|baa|lamb
horse|four|neigh|foal
pig|four|oink|piglet
duck|two|quack|duckling
hen|two|cluck|chick
goat|four|meh|kid
frog|four|ribbit|tadpole
lion|four|roar|cub
owl|two|hoo hoo|owlet
bee|six|buzz|larva
""",
)

MORE_LEGS = rows(
    "animal legs",
    """
spider|eight
ant|six
fly|six
butterfly|six
beetle|six
snake|no
fish|no
worm|no
bird|two
human|two
person|two
penguin|two
chicken|two
elephant|four
mouse|four
rabbit|four
tiger|four
bear|four
fox|four
giraffe|four
octopus|no
crab|ten
""",
)

COLOURS = rows(
    "thing verb colour",
    """
the sky|is|blue
grass|is|green
snow|is|white
the sun|is|yellow
a banana|is|yellow
blood|is|red
a lemon|is|yellow
a tomato|is|red
a carrot|is|orange
coal|is|black
milk|is|white
the sea|is|blue
an elephant|is|grey
chocolate|is|brown
a frog|is|green
a strawberry|is|red
the night sky|is|black
a flamingo|is|pink
""",
)

MIXES = rows(
    "one two mix",
    """
red|blue|purple
blue|red|purple
yellow|blue|green
blue|yellow|green
red|yellow|orange
yellow|red|orange
black|white|grey
white|black|grey
red|white|pink
white|red|pink
""",
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
MONTH_DAYS = ("31", "28", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31")
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
)

AMOUNTS = rows(
    "things whole number",
    """
days|a week|7
months|a year|12
days|a year|365
weeks|a year|52
hours|a day|24
minutes|an hour|60
seconds|a minute|60
seasons|a year|4
letters|the English alphabet|26
years|a century|100
years|a decade|10
bytes|a kilobyte|1000
bits|a byte|8
planets|the solar system|8
colours|a rainbow|7
fingers|one hand|5
eggs|a dozen|12
legs|a chair|4
wheels|a car|4
wheels|a bicycle|2
strings|a violin|4
players|a football team|11
continents|the world|7
""",
)

SHAPES = rows(
    "shape number",
    """
a triangle|3
a square|4
a rectangle|4
a pentagon|5
a hexagon|6
a heptagon|7
an octagon|8
a cube|6
""",
)

WORDS = rows(
    "word language translation",
    """
hello|French|bonjour
hello|Spanish|hola
hello|German|hallo
hello|Italian|ciao
thank you|French|merci
thank you|Spanish|gracias
thank you|German|danke
thank you|Italian|grazie
yes|French|oui
yes|Spanish|si
yes|German|ja
yes|Italian|si
no|French|non
no|Spanish|no
no|German|nein
no|Italian|no
cat|French|chat
cat|Spanish|gato
cat|German|Katze
cat|Italian|gatto
dog|French|chien
dog|Spanish|perro
dog|German|Hund
dog|Italian|cane
water|French|eau
water|Spanish|agua
water|German|Wasser
water|Italian|acqua
house|French|maison
house|Spanish|casa
house|German|Haus
house|Italian|casa
goodbye|French|au revoir
goodbye|Spanish|adios
goodbye|German|auf Wiedersehen
goodbye|Italian|arrivederci
""",
)

MAKERS = rows(
    "product origin",
    """
honey|bees
milk|cows
wool|sheep
eggs|hens
paper|trees
bread|flour, water and yeast
cheese|milk
wine|grapes
chocolate|cocoa beans
glass|sand
""",
)

HOMES = rows(
    "animal home",
    """
a fish|in water
a bird|in a nest
a bee|in a hive
a camel|in the desert
a polar bear|in the Arctic
a penguin|in the Antarctic
a lion|in the savanna
a monkey|in the jungle
a whale|in the ocean
a fox|in a den
a spider|in a web
""",
)


def _neighbours(names: tuple[str, ...]) -> tuple[Slots, ...]:
    """Each name with the one before and the one after it, around the circle."""
    count = len(names)
    return tuple(
        {"name": name, "after": names[(i + 1) % count], "before": names[i - 1]}
        for i, name in enumerate(names)
    )


def _opposites() -> tuple[Slots, ...]:
    pairs = [line.split("|") for line in OPPOSITES.strip().splitlines()]
    return tuple(
        {"word": one, "opposite": other} for a, b in pairs for one, other in ((a, b), (b, a))
    )


def _animal_legs() -> tuple[Slots, ...]:
    both = [*ANIMALS, *MORE_LEGS]
    return tuple(
        {
            "animal": row["animal"],
            "a": "an" if row["animal"][0] in "aeio" else "a",
            "legs": row["legs"],
        }
        for row in both
    )


def _geography() -> list[Topic]:
    return [
        Topic(
            "capital",
            (
                "What is the capital of {country}?",
                "What's the capital of {country}?",
                "Which city is the capital of {country}?",
                "Tell me the capital of {country}.",
                "capital of {country}",
                "Name the capital of {country}.",
                "Do you know the capital of {country}?",
                "What is the capital city of {country}?",
                "{country}: what is its capital?",
                "What city is the capital of {country}?",
                "I want to know the capital of {country}.",
            ),
            ("The capital of {country} is {capital}.",),
            CAPITALS,
            ("And of {country}?", "What about {country}?", "And {country}?", "How about {country}?"),
            held_out=(
                "Can you say which city is the capital city of {country}?",
                "Give me the name of the capital of {country}.",
            ),
            keywords=("{capital}",),
            weight=11,
        ),
        Topic(
            "country_of_capital",
            (
                "{capital} is the capital of which country?",
                "Which country has the capital {capital}?",
                "What country is {capital} the capital of?",
                "In which country is {capital}?",
                "Where is {capital}?",
            ),
            ("{capital} is the capital of {country}.",),
            CAPITALS,
            ("And {capital}?", "What about {capital}?"),
            held_out=("Of which country is {capital} the capital city?",),
            keywords=("{country}",),
            weight=6,
        ),
    ]


def _nature() -> list[Topic]:
    return [
        Topic(
            "legs",
            (
                "How many legs does {a} {animal} have?",
                "How many legs has {a} {animal}?",
                "Number of legs of {a} {animal}?",
                "Tell me how many legs {a} {animal} has.",
                "Do you know how many legs {a} {animal} has?",
            ),
            ("{a} {animal} has {legs} legs.",),
            _animal_legs(),
            ("And {a} {animal}?", "What about {a} {animal}?", "How about {a} {animal}?"),
            held_out=("What is the number of legs {a} {animal} has?",),
            keywords=("{legs}",),
            weight=5,
        ),
        Topic(
            "sound",
            (
                "What sound does a {animal} make?",
                "What does a {animal} say?",
                "Which sound does a {animal} make?",
                "How does a {animal} sound?",
                "What noise does a {animal} make?",
            ),
            ("A {animal} says {sound}.",),
            ANIMALS,
            ("And a {animal}?", "What about a {animal}?"),
            held_out=("Tell me what sound a {animal} makes.",),
            keywords=("{sound}",),
            weight=2,
        ),
        Topic(
            "young",
            (
                "What is a baby {animal} called?",
                "What do you call a baby {animal}?",
                "What is the name of a young {animal}?",
                "What is a young {animal} called?",
            ),
            ("A baby {animal} is called a {baby}.",),
            ANIMALS,
            ("And a baby {animal}?", "What about a {animal}?"),
            held_out=("How do you call a young {animal}?",),
            keywords=("{baby}",),
            weight=2,
        ),
        Topic(
            "home",
            (
                "Where does {animal} live?",
                "Where do I find {animal}?",
                "Tell me where {animal} lives.",
                "In which place does {animal} live?",
            ),
            ("{animal} lives {home}.",),
            HOMES,
            ("And {animal}?", "What about {animal}?"),
            held_out=("Do you know where {animal} lives?",),
            keywords=("{home}",),
            weight=1.5,
        ),
        Topic(
            "made_of",
            (
                "What is {product} made from?",
                "Where does {product} come from?",
                "Where do we get {product} from?",
                "What do you need to make {product}?",
            ),
            ("{product} comes from {origin}.",),
            MAKERS,
            ("And {product}?", "What about {product}?"),
            held_out=("Tell me where {product} comes from.",),
            keywords=("{origin}",),
            weight=1.5,
        ),
        Topic(
            "colour",
            (
                "What colour {verb} {thing}?",
                "What color {verb} {thing}?",
                "Which colour {verb} {thing}?",
                "Which colour does {thing} have?",
                "Tell me the colour of {thing}.",
                "What is the colour of {thing}?",
                "What is the color of {thing}?",
            ),
            ("{thing} {verb} {colour}.",),
            COLOURS,
            ("And {thing}?", "What about {thing}?", "How about {thing}?"),
            held_out=("Do you know what colour {thing} {verb}?",),
            keywords=("{colour}",),
            weight=3,
        ),
        Topic(
            "mix",
            (
                "What do you get when you mix {one} and {two}?",
                "Mix {one} and {two}.",
                "What colour is {one} mixed with {two}?",
                "What colour do {one} and {two} make?",
                "What is {one} plus {two}?",
            ),
            ("{one} and {two} make {mix}.",),
            MIXES,
            ("And {one} and {two}?", "What about {one} and {two}?"),
            held_out=("If I mix {one} with {two}, what do I get?",),
            keywords=("{mix}",),
            weight=2,
        ),
    ]


def _words() -> list[Topic]:
    return [
        Topic(
            "opposite",
            (
                "What is the opposite of {word}?",
                "What's the opposite of {word}?",
                "Opposite of {word}?",
                "Tell me the opposite of {word}.",
                "Which word is the opposite of {word}?",
                "What is the contrary of {word}?",
            ),
            ("The opposite of {word} is {opposite}.",),
            _opposites(),
            ("And of {word}?", "What about {word}?", "And {word}?"),
            held_out=("Name the opposite of the word {word}.",),
            keywords=("{opposite}",),
            weight=5,
        ),
        Topic(
            "translation",
            (
                "How do you say {word} in {language}?",
                "What is {word} in {language}?",
                "What is the {language} word for {word}?",
                "Translate {word} to {language}.",
                "Translate {word} into {language}.",
                "Say {word} in {language}.",
            ),
            ('"{word}" in {language} is "{translation}".',),
            WORDS,
            ("And {word} in {language}?", "What about {word} in {language}?"),
            held_out=("Tell me the word for {word} in {language}.",),
            keywords=("{translation}",),
            weight=3.5,
        ),
    ]


def _calendar() -> list[Topic]:
    days, months = _neighbours(DAYS), _neighbours(MONTHS)
    lengths = tuple({"month": m, "days": d} for m, d in zip(MONTHS, MONTH_DAYS, strict=True))
    nth = tuple({"nth": n, "month": m} for n, m in zip(ORDINALS, MONTHS, strict=True))
    after = (
        "What {kind} comes after {{name}}?",
        "Which {kind} comes after {{name}}?",
        "What {kind} is after {{name}}?",
        "Which {kind} follows {{name}}?",
        "What comes after {{name}}?",
    )
    before = (
        "What {kind} comes before {{name}}?",
        "Which {kind} comes before {{name}}?",
        "What {kind} is before {{name}}?",
        "What comes before {{name}}?",
    )
    follow = ("And after {name}?", "What about after {name}?")
    follow_before = ("And before {name}?", "What about before {name}?")
    topics = []
    for kind, slots in (("day", days), ("month", months)):
        topics.append(
            Topic(
                f"{kind}_after",
                tuple(text.format(kind=kind) for text in after),
                ("{after} comes after {name}.",),
                slots,
                follow,
                held_out=(f"Tell me the {kind} that comes after {{name}}.",),
                keywords=("{after}",),
                weight=1.7,
            )
        )
        topics.append(
            Topic(
                f"{kind}_before",
                tuple(text.format(kind=kind) for text in before),
                ("{before} comes before {name}.",),
                slots,
                follow_before,
                held_out=(f"Tell me the {kind} that comes before {{name}}.",),
                keywords=("{before}",),
                weight=1.7,
            )
        )
    topics.append(
        Topic(
            "month_length",
            (
                "How many days does {month} have?",
                "How many days are in {month}?",
                "How many days are there in {month}?",
                "How long is {month}?",
            ),
            ("{month} has {days} days.",),
            lengths,
            ("And {month}?", "What about {month}?"),
            held_out=("Tell me how many days {month} has.",),
            keywords=("{days}",),
            weight=1.5,
        )
    )
    topics.append(
        Topic(
            "month_number",
            (
                "What is the {nth} month?",
                "Which month is the {nth} month?",
                "What is the {nth} month of the year?",
                "Name the {nth} month of the year.",
            ),
            ("The {nth} month of the year is {month}.",),
            nth,
            ("And the {nth}?", "What about the {nth} one?"),
            held_out=("Tell me the {nth} month.",),
            keywords=("{month}",),
            weight=1.5,
        )
    )
    return topics


def _counts() -> list[Topic]:
    return [
        Topic(
            "amount",
            (
                "How many {things} are in {whole}?",
                "How many {things} are there in {whole}?",
                "How many {things} does {whole} have?",
                "How many {things} has {whole}?",
                "Do you know how many {things} are in {whole}?",
            ),
            ("There are {number} {things} in {whole}.",),
            AMOUNTS,
            ("And how many {things} in {whole}?", "How many {things} in {whole}?"),
            held_out=("Tell me how many {things} there are in {whole}.",),
            keywords=("{number}",),
            weight=3.5,
        ),
        Topic(
            "sides",
            (
                "How many sides does {shape} have?",
                "How many sides has {shape}?",
                "Number of sides of {shape}?",
                "Tell me how many sides {shape} has.",
            ),
            ("{shape} has {number} sides.",),
            SHAPES,
            ("And {shape}?", "What about {shape}?"),
            held_out=("Do you know how many sides {shape} has?",),
            keywords=("{number}",),
            weight=1.5,
        ),
    ]


def _space() -> list[Topic]:
    nth = tuple({"nth": n, "planet": p} for n, p in zip(ORDINALS, PLANETS, strict=False))
    after = tuple({"one": a, "two": b} for a, b in zip(PLANETS, PLANETS[1:], strict=False))
    known = rows(
        "riddle planet",
        """
the largest planet|Jupiter
the biggest planet|Jupiter
the smallest planet|Mercury
the red planet|Mars
the hottest planet|Venus
the planet with the big rings|Saturn
the planet with rings|Saturn
the planet we live on|Earth
the planet closest to the sun|Mercury
the planet farthest from the sun|Neptune
our planet|Earth
""",
    )
    return [
        Topic(
            "planet_number",
            (
                "What is the {nth} planet?",
                "Which planet is the {nth} from the sun?",
                "What is the {nth} planet from the sun?",
                "Name the {nth} planet.",
            ),
            ("The {nth} planet from the sun is {planet}.",),
            nth,
            ("And the {nth}?", "What about the {nth} one?"),
            held_out=("Tell me the {nth} planet from the sun.",),
            keywords=("{planet}",),
            weight=1.5,
        ),
        Topic(
            "planet_after",
            ("Which planet comes after {one}?", "What planet is after {one}?"),
            ("{two} comes after {one}.",),
            after,
            ("And after {one}?",),
            held_out=("What planet comes after {one}?",),
            keywords=("{two}",),
        ),
        Topic(
            "planet_known",
            ("What is {riddle}?", "Which is {riddle}?", "What is {riddle} called?"),
            ("That is {planet}.", "{planet} is {riddle}."),
            known,
            ("And {riddle}?", "And which is {riddle}?"),
            held_out=("Tell me which is {riddle}.",),
            keywords=("{planet}",),
            weight=1.5,
        ),
    ]


def _lists() -> list[Topic]:
    def listed(
        name: str, what: str, items: str, extra: tuple[str, ...] = (), key: str = ""
    ) -> Topic:
        return Topic(
            name,
            (
                f"List {what}.",
                f"Name {what}.",
                f"Tell me {what}.",
                f"What are {what}?",
                f"Say {what}.",
                *extra,
            ),
            (items,),
            held_out=(f"Can you list {what} for me?",),
            keywords=(key,) if key else (),
            weight=0.6,
        )

    return [
        listed(
            "days",
            "the days of the week",
            "The days of the week are " + ", ".join(DAYS[:-1]) + " and Sunday.",
            key="Thursday",
        ),
        listed(
            "months",
            "the months of the year",
            "The months of the year are " + ", ".join(MONTHS[:-1]) + " and December.",
            ("List all months.",),
            key="September",
        ),
        listed(
            "planets",
            "the planets",
            "The planets are " + ", ".join(PLANETS[:-1]) + " and Neptune.",
            ("List the planets of the solar system.",),
            key="Saturn",
        ),
        listed(
            "seasons",
            "the seasons",
            "The four seasons are spring, summer, autumn and winter.",
            key="autumn",
        ),
        listed(
            "rainbow",
            "the colours of the rainbow",
            "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.",
            ("What colours does a rainbow have?",),
            key="violet",
        ),
        listed(
            "continents",
            "the continents",
            "The continents are Africa, Antarctica, Asia, Australia, Europe, North America"
            " and South America.",
            key="Europe",
        ),
        listed(
            "alphabet",
            "the letters of the alphabet",
            "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
            ("Say the alphabet.", "Recite the alphabet."),
            key="Q, R, S",
        ),
    ]


def _sun_and_moon() -> list[Topic]:
    return [
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
    ]


def topics() -> list[Topic]:
    """All topics about simple facts."""
    return [
        *_geography(),
        *_nature(),
        *_words(),
        *_calendar(),
        *_counts(),
        *_space(),
        *_lists(),
        *_sun_and_moon(),
    ]
