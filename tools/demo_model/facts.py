"""Tables of simple facts about the world."""

from __future__ import annotations

from tools.demo_model.topic import Slots, rows

CAPITALS = rows(
    "country capital",
    """France|Paris; Italy|Rome; Spain|Madrid; Germany|Berlin; Portugal|Lisbon; Austria|Vienna
Switzerland|Bern; Belgium|Brussels; the Netherlands|Amsterdam; Denmark|Copenhagen
Sweden|Stockholm; Norway|Oslo; Finland|Helsinki; Iceland|Reykjavik; Ireland|Dublin
England|London; Scotland|Edinburgh; Poland|Warsaw; Hungary|Budapest; Greece|Athens
Turkey|Ankara; Russia|Moscow; Ukraine|Kyiv; Romania|Bucharest; Bulgaria|Sofia; Croatia|Zagreb
Serbia|Belgrade; Estonia|Tallinn; Latvia|Riga; Egypt|Cairo; Kenya|Nairobi; Morocco|Rabat
Ethiopia|Addis Ababa; Ghana|Accra; China|Beijing; Japan|Tokyo; South Korea|Seoul
India|New Delhi; Thailand|Bangkok; Vietnam|Hanoi; Indonesia|Jakarta; Iran|Tehran; Iraq|Baghdad
Israel|Jerusalem; Australia|Canberra; New Zealand|Wellington; Canada|Ottawa
the United States|Washington; Mexico|Mexico City; Cuba|Havana; Brazil|Brasilia
Argentina|Buenos Aires; Chile|Santiago; Peru|Lima; Colombia|Bogota""",
)

#: Other names, only in the direction from country to capital.

OTHER_NAMES = rows(
    "country capital",
    """the USA|Washington; America|Washington; the UK|London; Great Britain|London
Holland|Amsterdam""",
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
    """dog|four|woof|puppy; cat|four|meow|kitten; cow|four|moo|calf; sheep|four|baa|lamb
horse|four|neigh|foal; pig|four|oink|piglet; duck|two|quack|duckling; hen|two|cluck|chick
goat|four|meh|kid; frog|four|ribbit|tadpole; lion|four|roar|cub; owl|two|hoo hoo|owlet
bee|six|buzz|larva""",
)

MORE_LEGS = rows(
    "animal legs",
    """spider|eight; ant|six; fly|six; butterfly|six; beetle|six; snake|no; fish|no; worm|no
bird|two; human|two; person|two; penguin|two; chicken|two; elephant|four; mouse|four
rabbit|four; tiger|four; bear|four; fox|four; giraffe|four; octopus|no; crab|ten""",
)

COLOURS = rows(
    "thing verb colour",
    """the sky|is|blue; grass|is|green; snow|is|white; the sun|is|yellow; a banana|is|yellow
blood|is|red; a lemon|is|yellow; a tomato|is|red; a carrot|is|orange; coal|is|black
milk|is|white; the sea|is|blue; an elephant|is|grey; chocolate|is|brown; a frog|is|green
a strawberry|is|red; the night sky|is|black; a flamingo|is|pink""",
)

MIXES = rows(
    "one two mix",
    """red|blue|purple; blue|red|purple; yellow|blue|green; blue|yellow|green
red|yellow|orange; yellow|red|orange; black|white|grey; white|black|grey; red|white|pink
white|red|pink""",
)

AMOUNTS = rows(
    "things whole number",
    """days|a week|7; months|a year|12; days|a year|365; weeks|a year|52; hours|a day|24
minutes|an hour|60; seconds|a minute|60; seasons|a year|4; letters|the English alphabet|26
years|a century|100; years|a decade|10; bytes|a kilobyte|1000; bits|a byte|8
planets|the solar system|8; colours|a rainbow|7; fingers|one hand|5; eggs|a dozen|12
legs|a chair|4; wheels|a car|4; wheels|a bicycle|2; strings|a violin|4
players|a football team|11; continents|the world|7""",
)

SHAPES = rows(
    "shape number",
    """a triangle|3; a square|4; a rectangle|4; a pentagon|5; a hexagon|6; a heptagon|7
an octagon|8; a cube|6""",
)

WORDS = rows(
    "word language translation",
    """hello|French|bonjour; hello|Spanish|hola; hello|German|hallo; hello|Italian|ciao
thank you|French|merci; thank you|Spanish|gracias; thank you|German|danke
thank you|Italian|grazie; yes|French|oui; yes|Spanish|si; yes|German|ja; yes|Italian|si
no|French|non; no|Spanish|no; no|German|nein; no|Italian|no; cat|French|chat; cat|Spanish|gato
cat|German|Katze; cat|Italian|gatto; dog|French|chien; dog|Spanish|perro; dog|German|Hund
dog|Italian|cane; water|French|eau; water|Spanish|agua; water|German|Wasser
water|Italian|acqua; house|French|maison; house|Spanish|casa; house|German|Haus
house|Italian|casa; goodbye|French|au revoir; goodbye|Spanish|adios
goodbye|German|auf Wiedersehen; goodbye|Italian|arrivederci""",
)

MAKERS = rows(
    "product origin",
    """honey|bees; milk|cows; wool|sheep; eggs|hens; paper|trees; bread|flour, water and yeast
cheese|milk; wine|grapes; chocolate|cocoa beans; glass|sand""",
)

HOMES = rows(
    "animal home",
    """a fish|in water; a bird|in a nest; a bee|in a hive; a camel|in the desert
a polar bear|in the Arctic; a penguin|in the Antarctic; a lion|in the savanna
a monkey|in the jungle; a whale|in the ocean; a fox|in a den; a spider|in a web""",
)


def opposites() -> tuple[Slots, ...]:
    pairs = [line.split("|") for line in OPPOSITES.strip().splitlines()]
    return tuple(
        {"word": one, "opposite": other} for a, b in pairs for one, other in ((a, b), (b, a))
    )


def animal_legs() -> tuple[Slots, ...]:
    both = [*ANIMALS, *MORE_LEGS]
    return tuple(
        {
            "animal": row["animal"],
            "a": "an" if row["animal"][0] in "aeio" else "a",
            "legs": row["legs"],
        }
        for row in both
    )
