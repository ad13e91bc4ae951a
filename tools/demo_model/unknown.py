"""What the model does not know, and says so, as topics."""

from __future__ import annotations

from tools.demo_model.topic import Topic, plain, rows, wordings

UNKNOWN = (
    "I am a small toy model, I don't know that. Ask me about molink, simple facts or small numbers."
)

_THINGS = rows(
    "thing",
    """a good restaurant; quantum physics; the stock market; the French revolution
the theory of relativity; black holes; cryptography; the Roman empire; a washing machine
photosynthesis; the second world war; a nuclear reactor; tax law; poker; chess openings
an electric guitar; medicine; the lottery; the bible; philosophy; dinosaurs; volcanoes; bitcoin
insurance; heart disease; Shakespeare; Mozart; Einstein; Napoleon; Picasso; football results
genetics; vaccines; earthquakes; opera; Kubernetes; Java; inflation; democracy; yoga""",
)

_QUESTIONS = wordings("""Who wrote Hamlet? | Who wrote Don Quixote?
Who painted the Mona Lisa? | Who invented the telephone? | Who invented the wheel?
Who invented paper? | Who is the president of Italy? | Who is the president of China?
What is the weather in London? | What is the weather in Rome? | How is the weather in Berlin?
How do I cook pasta? | How do I make a cake? | Write a program that prints text.
Write a program that adds numbers. | Write code that reads a file. | Who is the best player?
Who won the election? | Who is the author of this book? | Who is the president?
Who is the president of the United States? | Who is the king of England?
Who won the world cup? | Who won the football game yesterday? | Who discovered America?
Who built the pyramids? | Who was Albert Einstein? | Who was Julius Caesar?
What is the weather like? | What is the weather today? | How will the weather be tomorrow?
Will it rain tomorrow? | What time is it? | What day is it today? | What is the date?
What is the meaning of life? | What is the price of gold? | What is the square root of 2?
What is the integral of x? | What is pi? | What is the speed of light? | How far is the moon?
How high is Mount Everest? | How deep is the ocean? | How many people live in China?
How many people live on Earth? | How many stars are there? | How do I cook rice?
How do I bake bread? | How do I fix my car? | How do I learn the piano? | How do I become rich?
How do I lose weight? | How do I grow tomatoes? | How does an engine work?
How does a plane fly? | Can you write code? | Write a program in Python.
Write a function that sorts a list. | Write an essay about history.
Write an email to my boss. | Translate this text to Chinese. | Recommend a book.
Recommend a good film. | Which film should I watch? | Which phone should I buy?
Book a flight to New York. | Order a pizza for me. | Play some music. | Set a timer.
Send a message to my mother. | Open the window. | Draw a picture. | What happened in 1789?
When was the first world war? | When did the Roman empire fall? | When was Mozart born?
Why is the sky blue? | Why do we dream? | Why do people fight? | What is the best laptop?
What is the news today? | What did I eat yesterday? | Where are my keys?
Where can I buy shoes? | Do you know my neighbour? | Is there life on Mars? | Is there a god?
Should I buy a house? | What will the stock price be? | Solve this equation.
Summarize this article. | What is DNA? | What is an atom? | What is gravity?
What is electricity made of? | What is a virus? | What is the largest city in the world?
What is the longest river? | What is the tallest building?
What language do they speak in Brazil?""")

_TOPICS = (
    Topic("unknown", _QUESTIONS, (UNKNOWN,), weight=5),
    Topic(
        "unknown_thing",
        wordings("""Tell me about {thing}. | What do you know about {thing}?
Explain {thing} to me. | Explain {thing}. | How does {thing} work? | Teach me {thing}.
Can you tell me about {thing}? | Can you help me with {thing}? | Please teach me about {thing}.
I want to learn {thing}. | I would like to know more about {thing}.
Where can I learn about {thing}? | What is {thing}? | Who knows about {thing}?
I have a question about {thing}. | Write a text about {thing}. | Who invented {thing}?"""),
        (UNKNOWN,),
        _THINGS,
        ("And {thing}?", "What about {thing}?"),
        held_out=("I would like to learn about {thing}.", "Can you teach me {thing}?"),
        keywords=("don't know",),
        weight=4,
    ),
    plain(
        "unknown_held_out",
        "Who is the best singer?\nWho is the richest person?",
        (UNKNOWN,),
        """Who invented the computer? | How do I cook a soup? | What is the weather in Paris?
Write a program that sorts numbers. | Who is the president of France?""",
        ("don't know",),
        weight=0.5,
    ),
)


def topics() -> list[Topic]:
    """All topics out of scope."""
    return list(_TOPICS)
