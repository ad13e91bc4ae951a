# ruff: noqa: E501  (tables of sentences: one to a line reads better)
"""How to use molink, command by command, as topics."""

from __future__ import annotations

from tools.demo_model.topic import Then, Topic, rows, wordings

_COMMANDS = rows(
    "command purpose does",
    """
molink up|start a swarm|starts the coordinator, a peer and the endpoint on this PC
molink join|join a swarm|adds this PC to a swarm: it finds the swarm in your network and shows a code to approve
molink demo|try it out|starts three peers on this PC with the bundled toy model
molink status|see the state of the swarm|shows the peers, the pipelines and their stages
molink top|watch the swarm live|shows a live view of the swarm in the terminal
molink chat|chat in the terminal|opens a chat with the model in the terminal
molink run|run a model|loads a model and serves it
molink pull|download a model|downloads a model into the store
molink list|list the models|lists the models; molink stop|stop a model|stops a model
molink apply|apply a swarm file|brings the swarm to the state that a swarm file describes
molink drain|drain a peer|lets a peer finish its work and gives it no more
molink leave|leave the swarm|takes this PC out of the swarm
molink approve|approve a new PC|lets a PC that asked to join into the swarm
molink invite|make a token|prints a token that admits one PC
molink revoke|remove a PC from the swarm|takes away the access of a peer
molink plan|plan the placement|predicts the placement and the speed without starting anything
molink simulate|simulate a swarm|plays a trace in virtual time
molink bench|measure the speed|measures how fast serving, a stage or a link is
molink doctor|find problems|checks this PC and says what to fix
molink service|start molink at boot|installs molink as a service of the system
molink logs|read the logs|shows the logs
""",
)

_USE = (
    Topic(
        "add_pc",
        wordings("""How do I add a PC? | How can I add a PC to the swarm?
How do I add another PC? | How do I join a swarm? | How does another computer join?
How do I add my second computer? | What do I type to add a PC?
I have another PC. How do I add it? | How do I join? | How can I connect a new PC?
Which command adds a PC? | Add a PC to molink? | How do I add a new machine?"""),
        (
            "Run molink join on the new PC: it finds the swarm and shows a code. If the first PC"
            " shows the same code, type it there. molink picks the layers itself.",
        ),
        then=(
            Then(
                ("Where do I get a token?", "Can I join with a token?", "What about a token?"),
                (
                    "Run molink invite on a PC of the swarm: it prints a token, which admits one"
                    " PC. Paste it behind molink join on the new one.",
                ),
            ),
            Then(
                ("What does --stage auto mean?", "What is --stage auto?"),
                (
                    "With --stage auto molink measures the PC and picks its layers. You can also"
                    " give a range like 1-12, or none.",
                ),
            ),
        ),
        held_out=wordings("""How can I add another computer to the swarm?
What do I type to join a swarm? | I want to add my new PC. How?"""),
        keywords=("molink join",),
        weight=3.5,
    ),
    Topic(
        "start",
        wordings("""How do I start molink? | How do I start? | How can I start a swarm?
How do I begin with molink? | How do I use molink? | How do I run molink?
How do I set up molink? | What is the first step? | Which command starts molink?
How do I get started? | How do I create a swarm?"""),
        (
            "Run molink up on the first PC: it starts the coordinator, a peer and the endpoint."
            " Then run molink join on the others. To try it on one PC, run molink demo.",
        ),
        then=(
            Then(
                ("And then?", "What next?", "What do I do next?"),
                (
                    "Then run molink join on each other PC, and type the code that it shows on the first.",
                ),
            ),
        ),
        held_out=("What do I type to start molink?", "How can I get started with molink?"),
        keywords=("molink up",),
        weight=3,
    ),
    Topic(
        "try_demo",
        wordings("""How do I try molink? | Can I try it on one PC? | Is there a demo?
How do I start the demo? | I only have one PC. Can I try molink? | What is the demo?"""),
        (
            "Run molink demo: it starts three peers on this PC with the bundled toy model. That is"
            " me.",
        ),
        held_out=("How can I try the demo on one PC?",),
        keywords=("molink demo",),
        weight=1.2,
    ),
    Topic(
        "status",
        wordings("""How do I see the status? | How can I see the state of the swarm?
How do I see which PCs are there? | How do I check the swarm? | Which command shows the status?
How do I know if it works? | How can I watch the swarm? | How do I see all peers?
Show me the status of the swarm."""),
        ("Run molink status to see the peers and pipelines, or molink top for a live view.",),
        held_out=("How can I check the status of the swarm?", "How do I see the peers?"),
        keywords=("molink status",),
        weight=2,
    ),
    Topic(
        "command",
        wordings("""What does {command} do? | What is {command}? | What is {command} for?
Explain {command}. | Tell me about {command}. | When do I use {command}? | {command}?"""),
        ("{command} {does}.",),
        _COMMANDS,
        ("And {command}?", "What about {command}?"),
        held_out=("Can you explain what {command} does?",),
        keywords=("{does}",),
        weight=4,
    ),
    Topic(
        "command_for",
        wordings("""Which command do I use to {purpose}? | What command do I need to {purpose}?
What do I run to {purpose}? | What is the command to {purpose}?
I want to {purpose}. Which command?"""),
        ("Use {command}: it {does}.",),
        _COMMANDS,
        ("And to {purpose}?",),
        held_out=("Tell me the command to {purpose}.",),
        keywords=("{command}",),
        weight=3,
    ),
    Topic(
        "commands",
        wordings("""Which commands are there? | What commands does molink have?
List the commands of molink. | List the commands. | What can I do with molink?"""),
        (
            "The main commands are molink up, molink join, molink demo, molink chat, molink status"
            " and molink top. There are also run, pull, list, stop, apply, drain, leave, invite,"
            " approve, revoke, plan, simulate, bench, doctor, service and logs.",
        ),
        held_out=("Tell me the commands of molink.",),
        keywords=("molink join", "molink status"),
    ),
)


def topics() -> list[Topic]:
    """All topics about using molink."""
    return list(_USE)
