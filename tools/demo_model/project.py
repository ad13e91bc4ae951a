# ruff: noqa: E501  (tables of sentences: one to a line reads better)
"""What molink is and how it behaves, as topics."""

from __future__ import annotations

from tools.demo_model.topic import Then, Topic, plain, rows, wordings

WHAT = (
    "molink pools the PCs you already own into one LLM server. Each PC holds a stage, which is some"
    " of the layers of the model. The stages form a ring, called the pipeline, and every PC offers"
    " the same OpenAI-style endpoint on localhost."
)

DETAIL = (
    "molink turns several PCs into one LLM server. Every PC runs one daemon, called a peer. A large"
    " model is cut into stages: each GPU or CPU holds a contiguous range of its layers. The stages"
    " form a ring, called the pipeline. When you ask something, your own PC turns the text into"
    " tokens and sends them to the head, which sits next to the first stage and forms batches. Each"
    " stage runs its layers and sends one tensor per token to the next stage over the network. The"
    " last stage is called the tail: it picks the next token and sends it back. The prompt is"
    " computed first, which is called prefill; then the answer comes token by token, which is called"
    " decode. Decode data always goes before prefill data, so your stream stays smooth. A"
    " coordinator decides which PC holds which layers. If a PC dies, another one takes over its"
    " stage and the stream goes on."
)

WHY_DECODE = (
    "Decode data is small and somebody is waiting for it, while prefill data is large. If decode had"
    " to wait behind prefill, every stream would stall. So molink sends decode first and lets"
    " prefill use the rest of the network."
)

DIES = (
    "When a PC dies, molink moves its stage to a spare PC or places the layers again. Then the"
    " prompt and the tokens so far are replayed, and the stream goes on. You see a pause, but no"
    " token is lost, doubled or changed."
)

PRIVACY = (
    "Only share a swarm with people you trust. Everything between the PCs is encrypted, but members"
    " of a swarm can read prompts and can alter answers."
)

_MEANINGS = rows(
    "term meaning",
    """
a stage|A stage is a contiguous range of the layers of the model. Each GPU or CPU in the swarm holds one stage.
a pipeline|A pipeline is one full copy of the model, spread over a ring of stages on several PCs.
a peer|A peer is one PC in the swarm: the daemon that runs on it.
a worker|A worker is the process that holds one stage on one device.
a swarm|A swarm is all the PCs of one owner or group that work together with molink.
the head|The head is the scheduler next to the first stage. It takes requests and forms batches.
the tail|The tail is the last stage of the pipeline. It samples the next token.
the coordinator|The coordinator is the control plane: it knows the peers, places the stages and routes the requests. No token passes through it.
a link|A link is a directed connection from one stage to the next.
a micro-batch|A micro-batch is a small group of requests that goes through the pipeline together, so that all stages have work.
prefill|Prefill is the first phase: the whole prompt goes through the model at once.
decode|Decode is the second phase: the model makes the answer one token at a time.
a token|A token is a small piece of text, like a word or a part of a word. The model reads and writes tokens.
a tick|A tick is a rising number that stamps every piece of work, so that all stages keep the same order.
an epoch|An epoch is the generation number of a pipeline. Messages of an older epoch are dropped.
the KV cache|The KV cache keeps the keys and values of the tokens so far, so that they need not be computed again.
a KV block|A KV block is a small page of the KV cache. Blocks are shared and reused.
a chunk|A chunk is a small piece of a large transfer, so that decode data never has to wait long.
a layer|A layer is one step of the model. A stage holds several layers in a row.
a daemon|A daemon is a program that runs in the background. Every PC of the swarm runs one.
the endpoint|The endpoint is the address your programs talk to. Every PC offers the same OpenAI-style endpoint on localhost.
TTFT|TTFT is the time to the first token: how long you wait until the answer begins.
TPOT|TPOT is the time per output token: how fast the answer is written.
a spare|A spare is a peer without a stage that waits to take over when another one dies.
the ring|The ring is the order of the stages: each one sends to the next, and the last one sends the new token back to the first.
an LLM|An LLM is a large language model: a program that predicts text, one token after another.
a GPU|A GPU is the graphics card of a PC. It is good at the arithmetic that a model needs.
quantization|Quantization stores the weights with fewer bits, so that a larger model fits into the memory.
""",
)

_BARE = tuple(
    {**slots, "bare": slots["term"].removeprefix("a ").removeprefix("an ").removeprefix("the ")}
    for slots in _MEANINGS
)

_WHAT = (
    Topic(
        "what_is_molink",
        wordings("""What is molink? | What's molink? | Tell me about molink.
What does molink do? | Explain molink. | Explain molink to me. | What is molink for?
What is this molink thing? | Describe molink. | I have never heard of molink. What is it?
Can you tell me what molink is? | molink? | So what is molink exactly?
What is molink good for?"""),
        (WHAT,),
        then=(
            Then(
                wordings("""Tell me more. | More details? | Tell me more about it.
How does it work? | Explain in more detail. | Go on. | And how does that work?"""),
                (DETAIL,),
            ),
        ),
        held_out=wordings("""Please explain to me what molink is.
I want to know what molink does. | Can you describe molink for me?"""),
        keywords=("PCs", "stage|layers", "pipeline|server"),
        weight=3,
    ),
    Topic(
        "molink_detail",
        wordings("""Explain how molink works in detail. | How does molink work?
Explain in detail how molink works. | How does molink work in detail?
Tell me in detail how molink works. | Give me a long explanation of molink.
Tell me everything about molink. | Explain how molink works.
Describe in detail how molink works."""),
        (DETAIL,),
        held_out=("Can you explain in detail how molink works?", "Describe how molink works."),
        keywords=("stage", "pipeline", "tail"),
        weight=0.8,
    ),
)

_TERMS = (
    Topic(
        "term",
        wordings("""What is {term}? | What's {term}? | What does {term} mean? | Explain {term}.
Explain what {term} is. | What do you mean by {term}? | Tell me what {term} is.
What is {term} in molink? | Define {term}. | What does {term} do?
Can you tell me what {term} is? | I do not understand what {term} is.
I do not know {term}. What is it? | Explain it: what is {term}? | Explain to me what {term} is.
What is {bare}? | What does {bare} mean? | What does the word {bare} mean? | {bare}?
What is the {bare} in molink? | What is meant by {bare}?"""),
        ("{meaning}",),
        _BARE,
        ("And {term}?", "What about {term}?", "And what is {term}?"),
        held_out=wordings("""Can you explain to me what {term} is?
I do not know what {term} is. Explain it."""),
        keywords=("{meaning}",),
        weight=8,
    ),
)

_BEHAVIOUR = (
    plain(
        "dies",
        """What happens when a PC dies? | What happens if a PC dies?
What happens if a PC is switched off? | What if one of the PCs dies?
What happens when a peer dies? | What happens if a peer crashes?
What if a PC goes away in the middle of an answer? | What if I turn off a PC?
What happens if I switch off a PC? | What happens if my laptop is turned off?
What happens if I shut down a computer? | What if one PC is turned off?
What happens when one of the computers crashes? | What happens when one computer is gone?
What happens when a stage dies? | What happens if I turn one PC off? | Can a PC fail?
A PC died. What happens now? | What happens if a computer crashes?""",
        DIES,
        """What if one PC is switched off in the middle of an answer?
What happens when a computer dies? | What happens if I switch off one of the PCs?""",
        ("stage", "stream|token"),
        (
            Then(
                ("Are tokens lost?", "Do I lose my answer?", "Is anything lost?"),
                ("No. The prompt and the tokens so far are replayed, and the stream goes on.",),
            ),
            Then(
                ("And without a spare?", "What if there is no spare?"),
                (
                    "Without enough PCs the requests are held for some time. After that you get an"
                    " error.",
                ),
            ),
        ),
        3,
    ),
    plain(
        "coordinator_dies",
        """What happens when the coordinator dies? | What if the coordinator dies?
What happens if the coordinator is killed? | What if the coordinator crashes?
Is the coordinator needed?""",
        "The streams go on, because no token passes through the coordinator. When it starts"
        " again it finds everything, or another PC takes over with molink up --take-over.",
        "What happens if the coordinator crashes?",
        ("streams", "take"),
    ),
    plain(
        "decode_first",
        """Why does decode go first? | Why is decode sent first? | Why decode first?
Why does decode go before prefill? | Why is decode more important than prefill?
What is sent first, decode or prefill? | Which goes first, decode or prefill?
Explain why decode goes first. | Why do you send decode data first?""",
        WHY_DECODE,
        "Can you explain why decode data goes first?\nWhy does decode data go before prefill data?",
        ("small|wait", "prefill"),
        weight=2,
    ),
    plain(
        "privacy",
        """Is molink private? | Is it private? | Can others read my prompts?
Who can read my prompts? | Is my data safe? | Is molink safe? | Is molink secure?
Can my friends read what I write? | What about privacy?
Can members of the swarm read prompts? | Is the traffic encrypted? | Who sees my prompts?""",
        PRIVACY,
        "Who can read what I write?\nCan other members read my prompts?\nIs my data private?",
        ("read prompts",),
        weight=2.5,
    ),
    plain(
        "platforms",
        """Does molink run on Windows? | Does it run on Windows? | Does molink run on Linux?
Which systems does molink support? | Can I use Windows? | Can I use Linux? | Do I need Linux?
Does it need WSL?""",
        "molink runs on Windows and on Linux, without WSL. You can mix both in one swarm.",
        "Can molink run on Windows?",
        ("Windows", "Linux"),
    ),
    plain(
        "gpu_needed",
        """Do I need a GPU? | Does molink need a GPU? | Can I use molink without a GPU?
Does it work on a CPU? | Do all PCs need the same GPU? | Which GPU do I need? | Can I mix GPUs?""",
        "A GPU makes it fast, but a CPU works too. The PCs may have different GPUs: molink gives"
        " each one as many layers as it can hold.",
        "Can I use it without a GPU?",
        ("CPU",),
    ),
    plain(
        "network",
        """What network do I need? | How fast must the network be?
How fast should my network be? | How much network speed do I need?
Does molink work over the internet? | Can I use molink with friends over the internet?
Do the PCs have to be in one room? | Does it work over wifi?""",
        "molink is made for ordinary networks: 100 Mbps to 1 Gbps, at home, in an office or with"
        " friends over the internet.",
        "How fast must my network be?",
        ("Mbps",),
    ),
    plain(
        "models",
        """Which models can molink run? | What models does molink support?
Which models work with molink? | Can molink run Llama? | Can molink run Qwen?
Can it run large models?""",
        "molink runs models of the Llama family: Llama, Mistral, Qwen, Phi-3 and Mixtral. A model"
        " that is too large for one PC can be spread over several.",
        "What models can molink run?",
        ("Llama",),
    ),
    plain(
        "api",
        """How do I use it from Python? | How can my program use molink? | What is the API?
Is there an API? | Can I use the OpenAI client? | Which port does molink use?
What is the address of the endpoint? | How do I connect my program?""",
        "Point any OpenAI client at http://127.0.0.1:5465/v1 on your own PC. Every PC of the swarm"
        " offers the same endpoint.",
        "How can I use molink from Python?",
        ("5465",),
        weight=1.3,
    ),
    plain(
        "licence",
        """Is molink free? | Do I pay for it? | Do I have to buy molink? | Must I pay?
What does molink cost? | Is molink open source? | Which licence does molink have?
What is the license of molink? | How much does it cost?""",
        "molink is free and open source, under the Apache 2.0 licence.",
        "Do I have to pay for molink?",
        ("free",),
    ),
    plain(
        "why_molink",
        """Why should I use molink? | Why do I need molink? | Why not use one PC?
What is the advantage of molink? | Why use several PCs?""",
        "Because a large model does not fit on one PC. With molink your PCs hold it together, you"
        " need no cloud, and the swarm goes on when a PC is switched off.",
        "Why would I use several PCs?",
        ("model",),
    ),
    plain(
        "speed",
        """Is molink fast? | How fast is molink? | How can I make it faster? | Why is it slow?
What makes it slow?""",
        "The speed depends on the GPUs and on the network between them. Run molink bench to"
        " measure it, and molink plan to predict it.",
        "What can I do to make molink faster?",
        ("molink bench",),
    ),
    plain(
        "layers_choice",
        """Who decides which PC holds which layers? | How are the layers placed?
Who places the stages? | How does molink choose the stages? | Can I choose the layers myself?""",
        "The coordinator places the stages: it measures the memory and the speed of each PC and"
        " of the links. You can also choose yourself, for example with --stage 1-12.",
        "How does molink place the layers?",
        ("coordinator",),
    ),
    plain(
        "head_tail_difference",
        """What is the difference between head and tail?
What is the difference between the head and the tail? | Head or tail, what is the difference?""",
        "The head is next to the first stage and forms the batches. The tail is the last stage and"
        " samples the next token.",
        "Can you explain the difference between head and tail?",
        ("first", "last"),
        weight=0.7,
    ),
    plain(
        "prefill_decode_difference",
        """What is the difference between prefill and decode?
Prefill or decode, what is the difference? | What is the difference between decode and prefill?""",
        "Prefill reads the whole prompt at once. Decode then makes the answer one token at a time.",
        "Can you explain the difference between prefill and decode?",
        ("prompt", "token"),
        weight=0.7,
    ),
)


def topics() -> list[Topic]:
    """All topics about molink itself."""
    return [*_WHAT, *_TERMS, *_BEHAVIOUR]
