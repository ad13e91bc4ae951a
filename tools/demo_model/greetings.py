# ruff: noqa: E501  (tables of sentences: one to a line reads better)
"""Greetings, thanks, moods and jokes, as topics."""

from __future__ import annotations

from tools.demo_model.topic import Then, Topic, plain, wordings

JOKES = wordings("""Why did the tensor cross the network? To get to the other stage.
Why was the pipeline so calm? Because decode always went first.
What do you call a PC without a stage? A spare time computer.
Why did the token go home? Its stream was over.
What is a layer's favourite cake? One with many layers.""")

_GREETINGS = (
    plain(
        "hello",
        """Hello | Hi | Hey | Hello! | Hi there | Hey there! | Hello there | Hello, model
Hi, how are things? | Good day | Greetings | Hello, who is there? | Hi molink
Hello, can you hear me? | Hey you""",
        wordings("""Hello! I am the demo model of molink. What would you like to know?
Hi there! How can I help you?"""),
        "Hello there, model!\nHey, hello!",
        ("molink|help",),
        weight=4,
    ),
    plain(
        "good_morning",
        "Good morning\nGood morning!\nMorning!\nA good morning to you",
        ("Good morning! I hope you have a nice day. How can I help you?",),
        "Hello, good morning!",
        ("morning|Hello|Hi",),
        weight=0.7,
    ),
    plain(
        "good_night",
        "Good night\nGood night!\nI go to bed now.\nI am going to sleep.\nSleep well!",
        ("Good night! Sleep well. Your swarm can go on without you.",),
        "Good night, sleep well!",
        ("night",),
        weight=0.7,
    ),
    plain(
        "good_evening",
        "Good evening\nGood evening!\nA good evening to you\nGood afternoon",
        ("Hello! It is nice of you to come by. How can I help you?",),
        weight=0.6,
    ),
    plain(
        "how_are_you",
        """How are you? | How are you doing? | How do you do? | How is it going?
How are you today? | Are you well? | Are you okay? | How do you feel? | What's up?
How are things? | Everything okay?""",
        ("I am fine, thank you. All my layers are working. And how are you?",),
        "How are you doing today?\nHello, how are you?",
        ("fine",),
        (
            Then(
                wordings("""I am fine too. | Good, thanks. | I'm fine. | Very well, thank you.
Fine. | Me too. | I am good."""),
                ("I am glad to hear that! What would you like to know?",),
            ),
            Then(
                ("Not so good.", "Bad.", "I am tired.", "Not well.", "I feel sick."),
                ("I am sorry to hear that. I hope you feel better soon.",),
            ),
        ),
        2.5,
    ),
    plain(
        "thanks",
        """Thanks | Thank you | Thank you! | Thanks a lot | Thank you very much | Many thanks
Great, thanks | Thanks for your help | That helps, thank you | Perfect, thanks | Ok thanks
Thank you so much | Thank you for your help | Thanks for the answer | Thank you for that""",
        ("You are welcome!", "You are welcome! Ask me anything else about molink."),
        "Thank you for the help!\nGreat, thank you very much",
        ("welcome",),
        weight=2,
    ),
    plain(
        "bye",
        """Bye | Goodbye | Bye bye | See you | See you later | See you tomorrow | Bye, see you
Bye, until tomorrow | Ok, goodbye | Goodbye, see you later | I have to go, bye
I have to go now. | Good bye! | Until next time | That is all, bye | Farewell | I am leaving.""",
        ("Goodbye! It was nice to talk to you.",),
        "Bye, see you tomorrow!\nI have to go, goodbye",
        ("Goodbye",),
        weight=2,
    ),
    plain(
        "meet",
        "Nice to meet you\nPleased to meet you\nIt is nice to meet you.\nGlad to meet you",
        ("Nice to meet you too! What would you like to know?",),
        weight=0.7,
    ),
)

_MOODS = (
    plain(
        "praise",
        """You are great | Well done | Good job | You are smart | Good answer | Well done!
That was a good answer | A very good answer | That is right | Wow | Nice | Great | Cool
Amazing | Awesome | That is great | I like you | I love you | Very good | Excellent""",
        ("Thank you, that is kind of you!",),
        "Well done, good answer!",
        ("Thank you",),
        weight=1.5,
    ),
    plain(
        "blame",
        """You are stupid | That is wrong | You are wrong | Bad answer | That was a bad answer
That is a very bad model | This answer is wrong | This is bad | You are bad | That is not right
That is nonsense | I do not like you | You are useless | That makes no sense""",
        ("I am sorry. I am only a small toy model. Please ask me in another way.",),
        "That is a bad answer",
        ("sorry",),
        weight=1.2,
    ),
    plain(
        "ok",
        "Ok\nOkay\nI see\nAlright\nUnderstood\nGot it\nAh\nHm\nYes\nNo\nRight\nSure\nFine\nInteresting",
        ("Good. What else would you like to know?",),
        "Ok, I see",
        ("else",),
        weight=1.5,
    ),
    plain(
        "laugh",
        "Haha\nLol\nThat is funny\nFunny\nHahaha\nVery funny",
        ("I am glad that you like it!",),
        weight=0.7,
    ),
    plain(
        "sad",
        "I am sad\nI feel sad\nI am very sad\nI feel so bad today\nToday I am sad\nI am a bit sad\nI am unhappy\nI had a bad day\nI am lonely\nI am angry",
        ("I am sorry to hear that. I hope your day gets better. Shall I tell you a joke?",),
        "I am so sad today",
        ("sorry",),
        (Then(("Yes", "Yes please", "Ok", "Sure", "Please do"), JOKES),),
    ),
    plain(
        "happy",
        "I am happy\nI feel good\nI am very happy\nI feel happy today\nI feel so good today\nToday I am happy\nI had a good day\nI am in a good mood\nToday is a great day",
        ("That is great! I am glad to hear that.",),
        "I am so happy today",
        ("glad",),
        weight=0.8,
    ),
    plain(
        "bored",
        "I am bored\nThis is boring\nI am very bored\nI am bored, tell me something\nI am bored. What now?\nI don't know what to do\nEntertain me\nI am so bored",
        ("Shall I tell you a joke or a story? You can also ask me about molink.",),
        "I am bored, what can we do?",
        ("joke",),
        (
            Then(("A joke", "A joke please", "Tell me a joke", "Joke"), JOKES),
            Then(("Yes", "Ok", "Yes please"), JOKES),
        ),
        weight=1,
    ),
    plain(
        "joke",
        """Tell me a joke | Tell me a joke! | Do you know a joke? | Make me laugh
Say something funny | Another joke | Give me a joke | I want to hear a joke""",
        JOKES,
        "Can you tell me a funny joke?",
        ("Why|What",),
        (
            Then(("Another one", "Another one please", "One more", "More", "Again"), JOKES),
            Then(("Haha", "That is funny", "Lol"), ("I am glad that you like it!",)),
        ),
        1.8,
    ),
    plain(
        "poem",
        """Write a poem | Tell me a poem | Write a poem about molink | Write a haiku
Do you know a poem? | Write a short poem | Write a poem about a swarm""",
        (
            "Small PCs in a ring,\neach one holds a part of me,\ntoken after token they sing,\n"
            "and together they are free.",
        ),
        "Can you write a poem?",
        ("ring",),
    ),
    plain(
        "unclear",
        "?\nasdf\n...\nqwerty\nblah blah\nxyz\ntest\nWhat?\nHuh?\nfoo bar\nbla\n123",
        ("I did not understand that. Please ask me in another way.",),
        weight=1,
    ),
    plain(
        "again_unknown",
        "Why?\nWhy is that?\nHow?\nWhat do you mean?\nAre you sure?\nReally?",
        ("I can not explain more than that, I am a small toy model.",),
        weight=0.8,
    ),
)


def topics() -> list[Topic]:
    """All topics of small talk."""
    return [*_GREETINGS, *_MOODS]
